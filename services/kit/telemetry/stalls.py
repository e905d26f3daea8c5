"""Measures how long the event loop of a process is blocked."""

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from prometheus_client import Gauge, Histogram

_INTERVAL_SECONDS = 0.02
"""Time between two measurements; shorter stalls may be missed."""
_SCHEDULER_FILE = Path('/proc/thread-self/schedstat')
"""Linux only: nanoseconds for which the current thread ran on a processor, and waited for a processor."""

_longest = Gauge(
    'twinkle_event_loop_longest_stall_seconds', 'Longest time that the event loop was blocked since the start.'
)
_seconds = Histogram(
    'twinkle_event_loop_stall_seconds',
    'Time that the event loop was blocked.',
    buckets=(0.001, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 5),
)


@dataclass(frozen=True)
class _Times:
    """Clocks of the event loop's thread, in seconds."""

    wall: float
    others: float
    """Processor time of the other threads of the process, plus the time that this thread waited for a processor."""


class StallMeter:
    """Measures the stalls of the running event loop. Use it from one event loop only."""

    def __init__(self) -> None:
        self.longest_seconds = 0.0
        """Longest stall."""
        self.longest_own_seconds = 0.0
        """Longest stall without the time in which other threads or processes ran. Other threads, such as a pass of the
        model, delay the event loop by holding the interpreter's lock; other processes occupy the processor."""
        self._begin = _Times(0.0, 0.0)

    @asynccontextmanager
    async def measuring(self) -> AsyncIterator[None]:
        """Measure while the context is open."""
        self._begin = _now()
        measuring = asyncio.create_task(self.run(), name='stalls')
        try:
            yield
        finally:
            measuring.cancel()
            self._observe()

    async def run(self) -> None:
        """Measure until the task is cancelled."""
        while True:
            self._begin = _now()
            await asyncio.sleep(_INTERVAL_SECONDS)
            self._observe()
            _longest.set(self.longest_seconds)

    def _observe(self) -> None:
        now = _now()
        stall = max(now.wall - self._begin.wall - _INTERVAL_SECONDS, 0.0)
        own = stall - (now.others - self._begin.others)
        self._begin = now
        _seconds.observe(stall)
        self.longest_seconds = max(self.longest_seconds, stall)
        self.longest_own_seconds = max(self.longest_own_seconds, own)


def _now() -> _Times:
    waited = 0
    with suppress(OSError, IndexError):
        waited = int(_SCHEDULER_FILE.read_text().split()[1])
    return _Times(time.perf_counter(), time.process_time() - time.thread_time() + waited / 1e9)
