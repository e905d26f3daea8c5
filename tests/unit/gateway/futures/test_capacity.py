"""Bounds on waiting and running futures, in number and in bytes."""

import asyncio
from datetime import UTC, datetime

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_futures
from twinkle_services.gateway.futures.capacity import FutureCapacity
from twinkle_services.gateway.futures.rules import Bounds, Future, FutureRequest
from twinkle_services.kit.errors import BytesFull, QueueFull, ServiceUnreachable

MIB = 1 << 20


class FirstAddFails(MemoryFutureStore):
    """Store that fails to add the first future after the second future was stored."""

    def __init__(self) -> None:
        super().__init__()
        self._calls = 0
        self._second = asyncio.Event()

    async def add_if_absent(self, future: Future) -> Future:
        """Store the future; the first call waits until a later call has stored its future, and then fails."""
        self._calls += 1
        if self._calls == 1:
            await self._second.wait()
            raise ServiceUnreachable('database')
        stored = await super().add_if_absent(future)
        self._second.set()
        return stored


async def test_failed_repeat_leaves_the_accepted_future_counted() -> None:
    """If one of two equal concurrent requests fails, the other request still counts until it is finished."""
    async with running_futures(
        stores=(FirstAddFails(), MemoryPayloadStore()), capacity=Bounds(per_tenant=1, total=1)
    ) as gateway:
        gateway.recorder.gate.clear()
        failed, accepted = await asyncio.gather(gateway.submit('one'), gateway.submit('one'), return_exceptions=True)
        assert isinstance(failed, ServiceUnreachable)
        assert isinstance(accepted, Future)
        with pytest.raises(QueueFull):
            await gateway.submit('two')
        gateway.recorder.gate.set()
        assert await gateway.outcome(accepted) == b'eno'
        assert await gateway.outcome(await gateway.submit('two')) == b'owt'


async def test_bytes_of_waiting_requests_are_bounded() -> None:
    """A tenant over its byte limit is refused and others are not; resumed futures count toward the limit."""
    sizes = Bounds(per_tenant=10, total=100)
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), sizes=sizes)
    async with running_futures(capacity=capacity) as gateway:
        gateway.recorder.gate.clear()
        first = await gateway.submit('a0', payload=b'12345678')
        with pytest.raises(BytesFull):
            await gateway.submit('a1', payload=b'123')
        gateway.acting_as('bob')
        await gateway.submit('b0', payload=b'12345678')
    again = FutureCapacity(Bounds(per_tenant=9, total=9), sizes=sizes)
    async with running_futures(capacity=again, stores=(gateway.store, gateway.payloads)) as resumed:
        resumed.recorder.gate.clear()
        await resumed.futures.resume()
        with pytest.raises(BytesFull):
            await resumed.submit('a1', payload=b'123')
        resumed.recorder.gate.set()
        assert await resumed.outcome(first) == b'87654321'
        assert await resumed.outcome(await resumed.submit('a1', payload=b'123')) == b'321'


async def test_requests_in_memory_are_bounded_by_their_bytes() -> None:
    """Running requests stay within the memory bound, all of them finish, and requests of other tenants run too."""
    async with running_futures(running_bytes=4 * MIB) as gateway:
        gateway.recorder.gate.clear()
        large = [await gateway.submit(f'a{n}', payload=bytes(MIB)) for n in range(8)]
        await gateway.recorder.has_started(3)
        gateway.acting_as('bob')
        small = await gateway.submit('b0')
        await gateway.recorder.has_started(4)
        assert sorted(gateway.recorder.started) == ['a0', 'a1', 'a2', 'b0']
        gateway.recorder.gate.set()
        assert await gateway.outcome(small) == b'0b'
        gateway.acting_as('alice')
        for future in large:
            assert await gateway.outcome(future) == bytes(MIB)


def test_capacity_counts_each_future_once() -> None:
    """A future that was added twice counts once until its second removal. An accepted future is never refused."""
    capacity = FutureCapacity(Bounds(per_tenant=1, total=2))
    capacity.enter_accepted(future_at(0))
    capacity.enter_accepted(future_at(0))
    for future in (future_at(1), future_at(2)):
        assert _enter_is_refused(capacity, future)
    capacity.enter(future_at(0, tenant='bob'))
    assert _enter_is_refused(capacity, future_at(0, tenant='carol'))
    capacity.leave(future_at(0))
    assert _enter_is_refused(capacity, future_at(1))
    capacity.leave(future_at(0))
    capacity.leave(future_at(0))
    capacity.enter(future_at(0, tenant='carol'))
    assert _enter_is_refused(capacity, future_at(1))


def test_capacity_bounds_bytes_per_tenant_and_in_total() -> None:
    """The bytes of a future count once, until the future was removed as often as it was added."""
    capacity = FutureCapacity(Bounds(per_tenant=9, total=9), sizes=Bounds(per_tenant=10, total=15))
    capacity.enter(future_at(0), 8)
    capacity.enter(future_at(0), 8)
    assert capacity.size_bytes(future_at(0)) == 8
    assert _enter_is_refused(capacity, future_at(1), 3)
    capacity.enter(future_at(1), 2)
    assert _enter_is_refused(capacity, future_at(0, tenant='bob'), 6)
    capacity.enter(future_at(0, tenant='bob'), 5)
    capacity.leave(future_at(0))
    assert _enter_is_refused(capacity, future_at(2), 1)
    capacity.leave(future_at(0))
    capacity.enter(future_at(2), 8)
    assert capacity.size_bytes(future_at(0)) == 0


def future_at(position: int, *, tenant: str = 'alice') -> Future:
    """Return a future at the given position of a lane."""
    request = FutureRequest(kind='x', key=f'k{position}', payload=b'', session_id='', lane='ad-1', position=position)
    return Future.accepted(request, tenant_id=tenant, moment=datetime(2026, 1, 1, tzinfo=UTC))


def _enter_is_refused(capacity: FutureCapacity, future: Future, size_bytes: int = 0) -> bool:
    try:
        capacity.enter(future, size_bytes)
    except QueueFull:
        return True
    return False
