"""Tests of queue slots: limits on their number and bytes, the order of granting, and the retry time of refusals."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from fixtures.model_verbs import let_others_run
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import Cancelled, QueueFull
from twinkle_services.model.application.admission import Admission, QueueLimits


class Harness:
    """An `Admission` object, and the slots that the test has taken."""

    def __init__(self, *, operation_count: int = 2, request_bytes: int = 1000) -> None:
        self.clock = FakeClock()
        limits = QueueLimits(operation_count=operation_count, request_bytes=request_bytes)
        self.admission = Admission(limits, self.clock)
        self.order: list[str] = []
        self.slots: list[AsyncExitStack] = []

    async def hold(self, *, tenant: str = 'alice', size_bytes: int = 0, is_urgent: bool = False) -> AsyncExitStack:
        """Take a slot immediately; `aclose` of the result releases the slot."""
        stack = AsyncExitStack()
        self.slots.append(stack)
        slot = self.admission.slot(tenant, size_bytes=size_bytes, is_waiting_allowed=False, is_urgent=is_urgent)
        await stack.enter_async_context(slot)
        return stack

    def wait(self, name: str, *, size_bytes: int = 0) -> 'asyncio.Task[None]':
        """Wait for a slot in a task; `order` records the grant. Cancelling the task releases the slot."""

        async def waiting() -> None:
            slot = self.admission.slot('alice', adapter_id=name, size_bytes=size_bytes, is_waiting_allowed=True)
            async with slot:
                self.order.append(name)
                await asyncio.Event().wait()

        return asyncio.ensure_future(waiting())


async def _cancel(*tasks: 'asyncio.Task[None]') -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_full_queue_refuses_its_tenant_only() -> None:
    """A full queue of one tenant refuses the tenant's next operation and does not affect other tenants."""
    harness = Harness()
    slots = [await harness.hold(), await harness.hold()]
    with pytest.raises(QueueFull) as caught:
        await harness.hold()
    assert (caught.value.queue_length, caught.value.queue_limit) == (2, 2)
    await harness.hold(tenant='bob')
    await slots[0].aclose()
    await harness.hold()


async def test_queued_bytes_are_bounded() -> None:
    """The bytes of the requests in a queue are limited, but one request in an empty queue may have any size."""
    harness = Harness(operation_count=100)
    first = await harness.hold(size_bytes=900)
    with pytest.raises(QueueFull):
        await harness.hold(size_bytes=101)
    await harness.hold(size_bytes=100)
    await first.aclose()
    await harness.hold(size_bytes=900)
    other = Harness()
    await other.hold(size_bytes=5000)
    with pytest.raises(QueueFull):
        await other.hold(size_bytes=1)


async def test_slots_are_granted_in_order_of_arrival() -> None:
    """A later or smaller request does not overtake an earlier one."""
    harness = Harness(operation_count=3)
    slots = [await harness.hold(size_bytes=400), await harness.hold(size_bytes=400)]
    waiting = [harness.wait('large', size_bytes=900), harness.wait('small', size_bytes=10)]
    await let_others_run()
    with pytest.raises(QueueFull):
        await harness.hold(size_bytes=10)
    await slots[0].aclose()
    await let_others_run()
    assert harness.order == []
    await slots[1].aclose()
    await let_others_run()
    assert harness.order == ['large', 'small']
    await _cancel(*waiting)


async def test_a_released_slot_wakes_one_waiter() -> None:
    """Releasing one slot wakes exactly one waiter."""
    harness = Harness(operation_count=1)
    slots = await harness.hold()
    waiting = [harness.wait('first')]
    await let_others_run()
    await slots.aclose()
    await let_others_run()
    later = harness.wait('second')
    await let_others_run()
    assert harness.order == ['first']
    await _cancel(*waiting)
    await let_others_run()
    assert harness.order == ['first', 'second']
    await _cancel(later)


async def test_waiting_operations_are_bounded() -> None:
    """The number of waiting operations is limited too; beyond it, even callers that accept waiting are refused."""
    harness = Harness(operation_count=2)
    slots = [await harness.hold(), await harness.hold()]
    waiting = [harness.wait('a'), harness.wait('b')]
    await let_others_run()
    with pytest.raises(QueueFull):
        async with harness.admission.slot('alice', is_waiting_allowed=True):
            pass
    await _cancel(*waiting)
    for stack in slots:
        await stack.aclose()
    large = Harness(operation_count=10, request_bytes=100)
    await large.hold(size_bytes=100)
    waiter = large.wait('c', size_bytes=90)
    await let_others_run()
    with pytest.raises(QueueFull):
        async with large.admission.slot('alice', size_bytes=20, is_waiting_allowed=True):
            pass
    await _cancel(waiter)


@pytest.mark.parametrize('is_slot_granted', [False, True])
async def test_a_cancelled_waiter_releases_its_slot(*, is_slot_granted: bool) -> None:
    """A cancelled waiter releases its slot, even if the slot was granted at the same moment."""
    harness = Harness(operation_count=2)
    slots, other = await harness.hold(), await harness.hold()
    cancelled, next_waiter = harness.wait('cancelled'), harness.wait('next')
    await let_others_run()
    if not is_slot_granted:
        cancelled.cancel()
    # No other task runs between the grant and the cancellation.
    await slots.aclose()
    cancelled.cancel()
    await let_others_run()
    assert harness.order == ['next']
    await _cancel(cancelled, next_waiter)
    await other.aclose()
    for _ in range(2):
        await harness.hold()
    with pytest.raises(QueueFull):
        await harness.hold()


@pytest.mark.parametrize('is_slot_granted', [False, True])
async def test_dropped_operations_release_their_slots(*, is_slot_granted: bool) -> None:
    """Dropped operations are cancelled and release their slots, even if a slot was granted at the same moment."""
    harness = Harness(operation_count=2)
    held, other = await harness.hold(), await harness.hold()
    dropped, next_waiter = harness.wait('dropped'), harness.wait('next')
    await let_others_run()
    harness.admission.drop('dropped')
    if not is_slot_granted:
        await let_others_run()
    # No other task runs between the cancellation and the grant.
    await held.aclose()
    with pytest.raises(Cancelled):
        await dropped
    await let_others_run()
    assert harness.order == ['next']
    await _cancel(next_waiter)
    await other.aclose()
    for _ in range(2):
        await harness.hold()
    with pytest.raises(QueueFull):
        await harness.hold()


async def test_an_urgent_operation_is_admitted_beyond_the_limit() -> None:
    """An urgent operation is admitted beyond the limit and counts towards it while it runs."""
    harness = Harness(operation_count=1)
    await harness.hold()
    urgent = await harness.hold(is_urgent=True)
    with pytest.raises(QueueFull) as caught:
        await harness.hold()
    assert caught.value.queue_length == 2
    await urgent.aclose()


async def test_the_retry_time_follows_the_rate_of_the_queue() -> None:
    """If a slot is released every two seconds, the retry time is 2 s, or 4 s with one waiting caller."""
    harness = Harness(operation_count=1)
    for _ in range(20):
        slots = await harness.hold()
        waiting = harness.wait('next')
        await let_others_run()
        harness.clock.advance(timedelta(seconds=2))
        await slots.aclose()
        await let_others_run()
        harness.clock.advance(timedelta(seconds=2))
        slots = harness.wait('last')
        await let_others_run()
        await _cancel(waiting)
        with pytest.raises(QueueFull) as caught:
            await harness.hold()
        earlier = harness.wait('earlier')
        await let_others_run()
        with pytest.raises(QueueFull) as refused:
            async with harness.admission.slot('alice', is_waiting_allowed=False):
                pass
        assert caught.value.retry_after == timedelta(seconds=2)
        assert refused.value.retry_after == timedelta(seconds=4)
        await _cancel(earlier, slots)


async def test_the_retry_time_is_bounded() -> None:
    """The retry time is between its minimum and its maximum for any measured interval."""
    for seconds in (0.0, 1e6):
        harness = Harness(operation_count=1)
        slots = await harness.hold()
        waiting = [harness.wait('a')]
        await let_others_run()
        await slots.aclose()
        await let_others_run()
        waiting.append(harness.wait('b'))
        await let_others_run()
        harness.clock.advance(timedelta(seconds=seconds))
        await _cancel(waiting[0])
        await let_others_run()
        with pytest.raises(QueueFull) as caught:
            await harness.hold()
        assert caught.value.retry_after is not None
        assert timedelta(milliseconds=50) <= caught.value.retry_after <= timedelta(minutes=5)
        await _cancel(*waiting)
