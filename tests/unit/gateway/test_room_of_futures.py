"""How much may wait and run at a time, in requests and in bytes, whatever callers do at the same time."""

import asyncio

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_desk
from services.gateway.futures.room import Room
from services.gateway.futures.rules import Bounds, Future
from services.kit.errors import BytesFull, QueueFull, ServiceUnreachable

MIB = 1 << 20


class FirstFails(MemoryFutureStore):
    """Refuses the first future, after the second has been kept."""

    def __init__(self) -> None:
        """Begin with none."""
        super().__init__()
        self._calls = 0
        self._second = asyncio.Event()

    async def add_if_absent(self, future: Future) -> Future:
        """Keep all but the first."""
        self._calls += 1
        if self._calls == 1:
            await self._second.wait()
            raise ServiceUnreachable('database')
        kept = await super().add_if_absent(future)
        self._second.set()
        return kept


async def test_failed_repeat_leaves_the_place_of_the_one_that_was_accepted() -> None:
    """Of two equal requests at once one fails: the other is counted until it is finished, and not longer."""
    async with running_desk(stores=(FirstFails(), MemoryPayloadStore()), room=Bounds(per_tenant=1, total=1)) as desk:
        desk.recorder.gate.clear()
        failed, accepted = await asyncio.gather(desk.submit('one'), desk.submit('one'), return_exceptions=True)
        assert isinstance(failed, ServiceUnreachable)
        assert isinstance(accepted, Future)
        with pytest.raises(QueueFull):
            await desk.submit('two')
        desk.recorder.gate.set()
        assert await desk.outcome(accepted) == b'eno'
        assert await desk.outcome(await desk.submit('two')) == b'owt'


async def test_bytes_that_wait_are_bounded_and_free_again() -> None:
    """A tenant with too many is told so, others not; what was resumed counts as well."""
    sizes = Bounds(per_tenant=10, total=100)
    room = Room(Bounds(per_tenant=9, total=9), sizes=sizes)
    async with running_desk(room=room) as desk:
        desk.recorder.gate.clear()
        first = await desk.submit('a0', payload=b'12345678')
        with pytest.raises(BytesFull):
            await desk.submit('a1', payload=b'123')
        desk.acting_as('bob')
        await desk.submit('b0', payload=b'12345678')
    again = Room(Bounds(per_tenant=9, total=9), sizes=sizes)
    async with running_desk(room=again, stores=(desk.store, desk.payloads)) as resumed:
        resumed.recorder.gate.clear()
        await resumed.verbs.resume()
        with pytest.raises(BytesFull):
            await resumed.submit('a1', payload=b'123')
        resumed.recorder.gate.set()
        assert await resumed.outcome(first) == b'87654321'
        assert await resumed.outcome(await resumed.submit('a1', payload=b'123')) == b'321'


async def test_requests_in_memory_are_bounded_by_their_bytes() -> None:
    """However many may run, those that begin have no more bytes than there is room for; all end, and others' run."""
    async with running_desk(running_bytes=4 * MIB) as desk:
        desk.recorder.gate.clear()
        large = [await desk.submit(f'a{n}', payload=bytes(MIB)) for n in range(8)]
        await desk.recorder.has_begun(3)
        desk.acting_as('bob')
        small = await desk.submit('b0')
        await desk.recorder.has_begun(4)
        assert sorted(desk.recorder.begun) == ['a0', 'a1', 'a2', 'b0']
        desk.recorder.gate.set()
        assert await desk.outcome(small) == b'0b'
        desk.acting_as('alice')
        for future in large:
            assert await desk.outcome(future) == bytes(MIB)
