"""Places of tenants: bounded in number and bytes, given first come first served, refused with a time that fits."""

import asyncio
from contextlib import AsyncExitStack
from datetime import timedelta

import pytest

from fixtures.model_verbs import let_others_run
from services.kit.clock import FakeClock
from services.kit.errors import QueueFull
from services.model.application.admission import Admission, QueueLimits


class Admitting:
    """An admission, and those that hold places."""

    def __init__(self, *, operation_count: int = 2, request_bytes: int = 1000) -> None:
        self.clock = FakeClock()
        limits = QueueLimits(operation_count=operation_count, request_bytes=request_bytes)
        self.admission = Admission(limits, self.clock)
        self.order: list[str] = []
        self.held: list[AsyncExitStack] = []

    async def hold(self, *, tenant: str = 'alice', size_bytes: int = 0, is_urgent: bool = False) -> AsyncExitStack:
        """Take a place at once; it is given back by `aclose`."""
        stack = AsyncExitStack()
        self.held.append(stack)
        place = self.admission.slot(tenant, size_bytes=size_bytes, is_waiting_allowed=False, is_urgent=is_urgent)
        await stack.enter_async_context(place)
        return stack

    def wait(self, name: str, *, size_bytes: int = 0) -> 'asyncio.Task[None]':
        """Begin to wait for a place; `order` tells when it came, and it is kept until cancelled."""

        async def waiting() -> None:
            async with self.admission.slot('alice', size_bytes=size_bytes, is_waiting_allowed=True):
                self.order.append(name)
                await asyncio.Event().wait()

        return asyncio.ensure_future(waiting())


async def _end(*tasks: 'asyncio.Task[None]') -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


async def test_a_place_too_many_is_refused_and_other_tenants_have_their_own() -> None:
    """A tenant's overload is its own."""
    admitting = Admitting()
    held = [await admitting.hold(), await admitting.hold()]
    with pytest.raises(QueueFull) as caught:
        await admitting.hold()
    assert (caught.value.queue_length, caught.value.queue_limit) == (2, 2)
    await admitting.hold(tenant='bob')
    await held[0].aclose()
    await admitting.hold()


async def test_bytes_are_bounded_too() -> None:
    """Few large requests fill the queue as many small ones do; one alone may be of any size."""
    admitting = Admitting(operation_count=100)
    first = await admitting.hold(size_bytes=900)
    with pytest.raises(QueueFull):
        await admitting.hold(size_bytes=101)
    await admitting.hold(size_bytes=100)
    await first.aclose()
    await admitting.hold(size_bytes=900)
    other = Admitting()
    await other.hold(size_bytes=5000)
    with pytest.raises(QueueFull):
        await other.hold(size_bytes=1)


async def test_places_are_given_in_the_order_of_asking() -> None:
    """Neither a newcomer nor a smaller request overtakes one that waits."""
    admitting = Admitting(operation_count=3)
    held = [await admitting.hold(size_bytes=400), await admitting.hold(size_bytes=400)]
    waiting = [admitting.wait('large', size_bytes=900), admitting.wait('small', size_bytes=10)]
    await let_others_run()
    with pytest.raises(QueueFull):
        await admitting.hold(size_bytes=10)
    await held[0].aclose()
    await let_others_run()
    assert admitting.order == []
    await held[1].aclose()
    await let_others_run()
    assert admitting.order == ['large', 'small']
    await _end(*waiting)


async def test_one_place_wakes_one_waiter() -> None:
    """The others sleep on."""
    admitting = Admitting(operation_count=1)
    held = await admitting.hold()
    waiting = [admitting.wait('first')]
    await let_others_run()
    await held.aclose()
    await let_others_run()
    later = admitting.wait('second')
    await let_others_run()
    assert admitting.order == ['first']
    await _end(*waiting)
    await let_others_run()
    assert admitting.order == ['first', 'second']
    await _end(later)


async def test_what_waits_is_bounded_as_well() -> None:
    """As much may wait as may be under way; then even the patient are refused, so that memory is bounded."""
    admitting = Admitting(operation_count=2)
    held = [await admitting.hold(), await admitting.hold()]
    waiting = [admitting.wait('a'), admitting.wait('b')]
    await let_others_run()
    with pytest.raises(QueueFull):
        async with admitting.admission.slot('alice', is_waiting_allowed=True):
            pass
    await _end(*waiting)
    for stack in held:
        await stack.aclose()
    large = Admitting(operation_count=10, request_bytes=100)
    await large.hold(size_bytes=100)
    patient = large.wait('c', size_bytes=90)
    await let_others_run()
    with pytest.raises(QueueFull):
        async with large.admission.slot('alice', size_bytes=20, is_waiting_allowed=True):
            pass
    await _end(patient)


@pytest.mark.parametrize('is_place_coming', [False, True])
async def test_who_leaves_takes_no_place_along(*, is_place_coming: bool) -> None:
    """Also one that leaves in the moment its place comes: the next one gets it, and in the end none is taken."""
    admitting = Admitting(operation_count=2)
    held, other = await admitting.hold(), await admitting.hold()
    leaving, next_one = admitting.wait('leaving'), admitting.wait('next')
    await let_others_run()
    if not is_place_coming:
        leaving.cancel()
    # Nothing else runs while the place is given on.
    await held.aclose()
    leaving.cancel()
    await let_others_run()
    assert admitting.order == ['next']
    await _end(leaving, next_one)
    await other.aclose()
    for _ in range(2):
        await admitting.hold()
    with pytest.raises(QueueFull):
        await admitting.hold()


async def test_an_urgent_one_gets_in_beyond_the_limit() -> None:
    """What the others wait for is not refused; it counts while it is there."""
    admitting = Admitting(operation_count=1)
    await admitting.hold()
    urgent = await admitting.hold(is_urgent=True)
    with pytest.raises(QueueFull) as caught:
        await admitting.hold()
    assert caught.value.queue_length == 2
    await urgent.aclose()


async def test_the_retry_time_follows_the_pace_of_the_queue() -> None:
    """Places that come free every two seconds, and one caller before: in four seconds it may be one's turn."""
    admitting = Admitting(operation_count=1)
    for _ in range(20):
        held = await admitting.hold()
        waiting = admitting.wait('next')
        await let_others_run()
        admitting.clock.advance(timedelta(seconds=2))
        await held.aclose()
        await let_others_run()
        admitting.clock.advance(timedelta(seconds=2))
        held = admitting.wait('last')
        await let_others_run()
        await _end(waiting)
        with pytest.raises(QueueFull) as caught:
            await admitting.hold()
        ahead = admitting.wait('ahead')
        await let_others_run()
        with pytest.raises(QueueFull) as behind:
            async with admitting.admission.slot('alice', is_waiting_allowed=False):
                pass
        assert caught.value.retry_after == timedelta(seconds=2)
        assert behind.value.retry_after == timedelta(seconds=4)
        await _end(ahead, held)


async def test_the_retry_time_is_bounded() -> None:
    """Neither at once nor in hours, whatever was measured."""
    for seconds in (0.0, 1e6):
        admitting = Admitting(operation_count=1)
        held = await admitting.hold()
        waiting = [admitting.wait('a')]
        await let_others_run()
        await held.aclose()
        await let_others_run()
        waiting.append(admitting.wait('b'))
        await let_others_run()
        admitting.clock.advance(timedelta(seconds=seconds))
        await _end(waiting[0])
        await let_others_run()
        with pytest.raises(QueueFull) as caught:
            await admitting.hold()
        assert caught.value.retry_after is not None
        assert timedelta(milliseconds=50) <= caught.value.retry_after <= timedelta(minutes=5)
        await _end(*waiting)
