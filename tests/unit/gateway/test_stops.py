"""A gateway that stops: nothing spins and nothing is waited for without end."""

import asyncio
from datetime import timedelta

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_desk
from services.gateway.fleet.members import Membership
from services.gateway.fleet.routing import RouteKey
from services.gateway.fleet.rules import Fleet, ReplicaReport
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.failover import Attempt
from services.kit.clock import FakeClock
from services.kit.errors import Draining, ServiceUnreachable

KEY = RouteKey(base_model='m', blocks=(1,))


class LanesAway(MemoryFutureStore):
    """Keeps futures, and is away where it is asked for lanes."""

    def __init__(self) -> None:
        """Begin empty, and away."""
        super().__init__()
        self.is_away = True
        self.was_asked = asyncio.Event()

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Refuse."""
        if self.is_away:
            self.was_asked.set()
            raise ServiceUnreachable('database')
        return await super().next_position(tenant_id, lane)


async def test_stop_waits_for_no_database_and_what_was_kept_is_carried_on_with() -> None:
    """Who asked is refused, and the next process carries it out."""
    store, payloads = LanesAway(), MemoryPayloadStore()
    async with running_desk(stores=(store, payloads)) as desk:
        asking = asyncio.create_task(desk.submit('one', lane='ad-1'))
        await store.was_asked.wait()
        async with asyncio.timeout(20):
            await desk.verbs.close()
        with pytest.raises(Draining):
            await asking
    store.is_away = False
    [kept] = store.futures.values()
    async with running_desk(stores=(store, payloads)) as after:
        assert await after.outcome(kept) == b'eno'


@pytest.mark.parametrize('is_begun', [True, False])
async def test_request_that_waits_for_a_replica_is_refused_once_the_gateway_stops(is_begun: bool) -> None:  # noqa: FBT001
    """Also one that was begun, with patience left; one for which there is a replica goes on."""
    membership = Membership(Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1)))
    membership.register(ReplicaReport(replica_id='a', service='sampler', address='h:a', base_models=('m',)))
    dispatch = Dispatch(membership, replica_wait=timedelta(minutes=1), begin_wait=timedelta(minutes=1))
    waiting = asyncio.create_task(dispatch.find(Attempt(key=KEY, is_begun=is_begun, tried={'a'})))
    membership.lose('a')
    await asyncio.sleep(0)
    membership.close()
    with pytest.raises(Draining):
        await waiting
    membership.register(ReplicaReport(replica_id='b', service='sampler', address='h:b', base_models=('m',)))
    assert (await dispatch.find(Attempt(key=KEY))).replica_id == 'b'
    with pytest.raises(Draining):
        await dispatch.find(Attempt(key=KEY, is_begun=is_begun, tried={'b'}))
