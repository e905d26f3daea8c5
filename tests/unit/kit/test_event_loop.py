"""Stalls of a service's event loop are metrics, and the meter of the tests excludes the time of other threads."""

import asyncio
import time

from fixtures.recorded_metrics import metric
from fixtures.stalls import StallMeter
from twinkle_services.kit.telemetry.event_loop import ServiceLoop, run_service

BLOCKED_SECONDS = 0.3


def test_stalls_after_the_start_are_metrics() -> None:
    """A callback that blocks the loop is counted and is the longest stall; the start of a service is not counted."""

    async def serve() -> None:
        compute(2 * BLOCKED_SECONDS)
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ServiceLoop)
        loop.measure_stalls()
        before = _stalls_of_seconds()
        await asyncio.sleep(0)
        compute()
        await asyncio.sleep(0)
        assert _stalls_of_seconds() == before + 1
        assert metric('twinkle_event_loop_longest_stall_seconds') >= BLOCKED_SECONDS

    run_service(serve())


def test_waiting_is_no_stall() -> None:
    """A loop that waits for events or timers is not blocked."""

    async def serve() -> None:
        loop = asyncio.get_running_loop()
        assert isinstance(loop, ServiceLoop)
        loop.measure_stalls()
        before = _stalls_of_seconds()
        await asyncio.wait_for(asyncio.to_thread(time.sleep, BLOCKED_SECONDS), timeout=10)
        assert _stalls_of_seconds() == before

    run_service(serve())


async def test_blocked_loop_is_a_stall() -> None:
    """A callback that blocks the event loop is measured, although no measurement runs during the callback."""
    stalls = StallMeter()
    async with stalls.measuring():
        await asyncio.sleep(0)
        compute()
    assert stalls.longest_seconds > BLOCKED_SECONDS / 2
    assert stalls.longest_own_seconds > BLOCKED_SECONDS / 2


async def test_own_time_of_a_stall_excludes_other_threads() -> None:
    """`longest_own_seconds` excludes the time in which another thread computes while the loop is blocked."""
    stalls = StallMeter()
    async with stalls.measuring():
        await asyncio.sleep(0)
        other = asyncio.get_running_loop().run_in_executor(None, compute)
        compute()
    assert stalls.longest_own_seconds < stalls.longest_seconds
    await other


def compute(seconds: float = BLOCKED_SECONDS) -> None:
    """Use the processor for the given number of seconds."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        sum(range(1000))


def _stalls_of_seconds() -> float:
    """Return the number of stalls of at least a quarter of a second."""
    count = metric('twinkle_event_loop_stall_seconds_count')
    return count - metric('twinkle_event_loop_stall_seconds_bucket', le='0.25')
