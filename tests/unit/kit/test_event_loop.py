"""Tests of the event loop of services: its stalls are metrics, and garbage collections rarely block it."""

import asyncio
import gc
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


def test_full_collections_are_rare_in_services() -> None:
    """Objects that outlive several collections cause no full collection in a service, which would block its loop."""

    async def serve() -> None:
        assert _full_collections_while_keeping(100_000) == 0

    thresholds = gc.get_threshold()
    run_service(serve())
    assert gc.get_threshold() == thresholds
    assert _full_collections_while_keeping(100_000) > 0


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


def _full_collections_while_keeping(count: int) -> int:
    """Create objects that live until the end of the call, and return the number of full collections meanwhile."""
    # Python compares the new objects with those that the last full collection has kept.
    gc.collect()
    before = gc.get_stats()[2]['collections']
    kept = [[None] for _ in range(count)]
    assert len(kept) == count
    return gc.get_stats()[2]['collections'] - before


def compute(seconds: float = BLOCKED_SECONDS) -> None:
    """Use the processor for the given number of seconds."""
    begin = time.thread_time()
    while time.thread_time() - begin < seconds:
        sum(range(1000))


def _stalls_of_seconds() -> float:
    """Return the number of stalls of at least a quarter of a second."""
    count = metric('twinkle_event_loop_stall_seconds_count')
    return count - metric('twinkle_event_loop_stall_seconds_bucket', le='0.25')
