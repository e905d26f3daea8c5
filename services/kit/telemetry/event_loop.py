"""Runs the event loop of a service, and measures its stalls: the times for which callbacks block the loop."""

import asyncio
import gc
import selectors
import time
from collections.abc import Coroutine
from contextlib import ExitStack
from typing import Any

from twinkle_services.kit.telemetry import measures

_SHORTEST_SECONDS = 0.001
"""Shortest stall that is observed; an iteration of the loop usually takes less."""
_COLLECTIONS_BEFORE_FULL = 100
"""Number of collections of the middle generation before a full one; Python's default is 10. Full collections block the
loop for 10 to 50 ms in a service with many objects, and find almost no garbage (docs/LOG.md, 2026-12-01)."""


class _MeasuringSelector(selectors.DefaultSelector):
    """Measures the time between two waits for events, in which the loop runs callbacks; waiting is not measured."""

    def __init__(self) -> None:
        super().__init__()
        self._is_measuring = False
        self.longest_seconds = 0.0
        """Longest stall since `start_measuring`."""
        self._last_wait_end = 0.0

    def start_measuring(self) -> None:
        """Start measuring."""
        self._is_measuring = True
        self._last_wait_end = time.perf_counter()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Wait for events."""
        if self._is_measuring:
            self._observe(time.perf_counter() - self._last_wait_end)
        ready = super().select(timeout)
        self._last_wait_end = time.perf_counter()
        return ready

    def _observe(self, stall: float) -> None:
        if stall < _SHORTEST_SECONDS:
            return
        measures.stall_seconds.record(stall)
        self.longest_seconds = max(self.longest_seconds, stall)


class ServiceLoop(asyncio.SelectorEventLoop):
    """Event loop of a service. It reports its stalls as metrics after `measure_stalls` is called."""

    def __init__(self) -> None:
        self._measured = _MeasuringSelector()
        self._observed = ExitStack()
        super().__init__(self._measured)

    def measure_stalls(self) -> None:
        """Start measuring. Call it after the start of the service, which may block the loop."""
        self._measured.start_measuring()
        self._observed.enter_context(measures.longest_stall.observing(lambda: self._measured.longest_seconds))

    def close(self) -> None:
        """Close the loop."""
        self._observed.close()
        super().close()


def run_service(main: Coroutine[Any, Any, None]) -> None:
    """Run a service until it ends, like `asyncio.run`.

    Later garbage collections leave out the objects that exist now: mostly modules, which live until the exit. Full
    collections are rare while the service runs.
    """
    gc.freeze()
    young, middle, full = gc.get_threshold()
    gc.set_threshold(young, middle, _COLLECTIONS_BEFORE_FULL)
    try:
        with asyncio.Runner(loop_factory=ServiceLoop) as runner:
            runner.run(main)
    finally:
        gc.set_threshold(young, middle, full)
