"""Tests of the checkpoint address that a replica receives when it registers."""

from datetime import timedelta

import pytest

from twinkle_services.gateway.config import FleetConfig
from twinkle_services.gateway.fleet.grpc import is_this_host
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.replicas import Replicas
from twinkle_services.gateway.fleet.rules import Fleet, ReplicaReport
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock

INTERNAL = Caller(tenant_id='', is_internal=True)


async def registered_address(checkpoint_address: str, replica_address: str) -> str:
    """Return the checkpoint address that a replica at `replica_address` receives."""
    fleet = Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1))
    replicas = Replicas(
        Membership(fleet),
        FleetConfig(),
        checkpoint_address=checkpoint_address,
        is_this_host=is_this_host,
    )
    report = ReplicaReport(replica_id='r', service='sampler', address=replica_address)
    address = await replicas.register(INTERNAL, report)
    assert [replica.report for replica in fleet.replicas()] == [report]
    return address


@pytest.mark.parametrize('address', ['127.0.0.1:7104', '[::1]:7104', 'localhost:7104', '127.8.8.8:1'])
async def test_loopback_address_is_withheld_from_another_host(address: str) -> None:
    """Only replicas on this host receive a loopback checkpoint address."""
    # 192.0.2.0/24 is reserved for documentation, so it is never this host.
    assert await registered_address(address, '192.0.2.7:7103') == ''
    assert await registered_address(address, '127.0.0.1:7103') == address


async def test_other_addresses_are_given_to_every_replica() -> None:
    """A replica on another host receives an address that is not loopback; an empty address is not replaced."""
    assert await registered_address('192.0.2.1:7104', '192.0.2.7:7103') == '192.0.2.1:7104'
    assert await registered_address('', '192.0.2.7:7103') == ''


async def test_addresses_of_this_host_are_recognized() -> None:
    """Loopback addresses and names count as this host, and a remote address does not."""
    assert await is_this_host('127.0.0.1')
    assert await is_this_host('localhost')
    assert not await is_this_host('192.0.2.7')
