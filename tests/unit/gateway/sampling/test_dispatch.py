"""Requests that wait for a replica while the gateway stops."""

import asyncio
from datetime import timedelta

import pytest

from services.gateway.fleet.members import Membership
from services.gateway.fleet.routing import RouteKey
from services.gateway.fleet.rules import Fleet, ReplicaReport
from services.gateway.sampling.dispatch import Attempt, Dispatch
from services.kit.clock import FakeClock
from services.kit.errors import Draining

KEY = RouteKey(base_model='m', blocks=(1,))


@pytest.mark.parametrize('is_started', [True, False])
async def test_waiting_request_is_refused_when_the_gateway_stops(is_started: bool) -> None:  # noqa: FBT001
    """A request that waits for a replica fails with Draining; a request with an available replica does not."""
    membership = Membership(Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1)))
    membership.register(ReplicaReport(replica_id='a', service='sampler', address='h:a', base_models=('m',)))
    dispatch = Dispatch(membership, replica_wait=timedelta(minutes=1), begin_wait=timedelta(minutes=1))
    waiting = asyncio.create_task(dispatch.find(Attempt(key=KEY, is_started=is_started, tried={'a'})))
    membership.mark_lost('a')
    await asyncio.sleep(0)
    membership.close()
    with pytest.raises(Draining):
        await waiting
    membership.register(ReplicaReport(replica_id='b', service='sampler', address='h:b', base_models=('m',)))
    assert (await dispatch.find(Attempt(key=KEY))).replica_id == 'b'
    with pytest.raises(Draining):
        await dispatch.find(Attempt(key=KEY, is_started=is_started, tried={'b'}))
