"""Stalls of the event loop are measured."""

import asyncio
import time

from services.kit.telemetry.stalls import StallMeter

BLOCKED_SECONDS = 0.3


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


def compute() -> None:
    """Use the processor."""
    begin = time.thread_time()
    while time.thread_time() - begin < BLOCKED_SECONDS:
        sum(range(1000))
