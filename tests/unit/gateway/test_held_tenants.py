"""Futures that cannot go on now keep nobody else out: those of tenants that owe, and samples of a version to come."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from fixtures.futures import PLACES, Recorder, running_desk
from services.gateway.futures.rules import Future, FutureOrder
from services.gateway.sampling.fair_queue import FairQueue, Places

MIB = 1 << 20
TEMPLATE = Future.accepted(
    FutureOrder(kind='k', key='', payload=b'', session_id=''), tenant_id='', moment=datetime(2026, 1, 1, tzinfo=UTC)
)


def _future(tenant_id: str, number: int) -> Future:
    return replace(TEMPLATE, tenant_id=tenant_id, future_id=f'{tenant_id}-{number}')


def test_held_tenant_is_left_out_and_keeps_its_order() -> None:
    """Others take all places meanwhile; once it is let go on, its futures begin as they came."""
    held = {'alice'}
    queue = FairQueue(Places(tenant=2, total=2), is_held=held.__contains__)
    for number in range(2):
        queue.add(_future('alice', number))
    assert queue.take() is None
    assert queue.is_anybody_held
    queue.add(_future('bob', 0))
    assert queue.take() == _future('bob', 0)
    queue.give_back('bob')
    held.clear()
    assert not queue.is_anybody_held
    assert [queue.take(), queue.take()] == [_future('alice', 0), _future('alice', 1)]


async def test_tenants_that_owe_take_no_places_and_go_on_later() -> None:
    """With more lanes of theirs than places, another tenant's futures run; theirs run once they have paid."""
    held = {'alice', 'carol'}
    async with running_desk(Recorder(held=held)) as desk:
        owing = list[Future]()
        for tenant in sorted(held):
            desk.acting_as(tenant)
            owing += [await desk.submit(f'{tenant}{n}', lane=f'ad-{n}') for n in range(PLACES.total)]
        desk.acting_as('bob')
        for position in range(3):
            assert await desk.outcome(await desk.submit(f'b{position}', lane='ad-b', position=position))
        assert desk.recorder.begun == ['b0', 'b1', 'b2']
        held.clear()
        for future in owing:
            desk.acting_as(future.tenant_id)
            assert await desk.outcome(future) == future.key.encode()[::-1]


async def test_nobody_looks_any_more_after_the_end() -> None:
    """What is held is left to the next process, which carries it out."""
    held = {'alice'}
    async with running_desk(Recorder(held=held)) as desk:
        future = await desk.submit('one', lane='ad-1')
    held.clear()
    for _ in range(5):
        await asyncio.sleep(0)
    assert desk.recorder.begun == []
    async with running_desk(stores=(desk.store, desk.payloads)) as after:
        assert await after.outcome(future) == b'eno'


@dataclass
class _VersionMaker(Recorder):
    """Samples wait until a step has made their version."""

    made: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        """Make the version, or wait for it."""
        if future.lane:
            self.made.set()
            return await super().__call__(future, payload)
        self.begun.append(future.key)
        self.came.set()
        await self.made.wait()
        return payload


async def test_samples_that_wait_for_a_version_leave_memory_for_the_step_that_makes_it() -> None:
    """Though they have all bytes that the tenant's samples may have, and none of them ends before it."""
    async with running_desk(_VersionMaker(), running_bytes=4 * MIB) as desk:
        samples = [await desk.submit(f's{n}', payload=bytes(MIB)) for n in range(5)]
        await desk.recorder.has_begun(3)
        step = await desk.submit('step', payload=bytes(MIB), lane='ad-1')
        assert await desk.outcome(step) == bytes(MIB)
        for future in samples:
            assert await desk.outcome(future) == bytes(MIB)
