"""Where a replica that joins is told to find the checkpoint service."""

from datetime import timedelta

import pytest

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.own_addresses import is_this_host
from services.gateway.fleet.register import Register
from services.gateway.fleet.rules import Fleet, ReplicaReport
from services.kit.caller import Caller
from services.kit.clock import FakeClock

INTERNAL = Caller(tenant_id='', is_internal=True)


async def told(checkpoint_address: str, replica_address: str) -> str:
    """Return what a replica at that address is told."""
    fleet = Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1))
    register = Register(Membership(fleet), checkpoint_address=checkpoint_address, is_this_host=is_this_host)
    report = ReplicaReport(replica_id='r', service='sampler', address=replica_address)
    welcome = await register(INTERNAL, report)
    assert fleet.find('r') == welcome.replica
    return welcome.checkpoint_address


@pytest.mark.parametrize('address', ['127.0.0.1:7104', '[::1]:7104', 'localhost:7104', '127.8.8.8:1'])
async def test_loopback_address_is_not_told_to_another_host(address: str) -> None:
    """It would mean the replica's own host there; a replica of this host is told."""
    # Addresses of the documentation are nobody's.
    assert await told(address, '192.0.2.7:7103') == ''
    assert await told(address, '127.0.0.1:7103') == address


async def test_other_addresses_are_told_to_everybody() -> None:
    """What is not loopback is taken to be reachable; nothing is nothing."""
    assert await told('192.0.2.1:7104', '192.0.2.7:7103') == '192.0.2.1:7104'
    assert await told('', '192.0.2.7:7103') == ''


async def test_addresses_of_this_machine_are_known() -> None:
    """By number and by name; those of others are not."""
    assert await is_this_host('127.0.0.1')
    assert await is_this_host('localhost')
    assert not await is_this_host('192.0.2.7')
