"""Detection of an engine core that hangs: a process that is stopped or in a call that never returns.

vLLM detects only a core that has exited. Requests to a hanging core would wait indefinitely, and the sampler would
continue to receive new requests.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

HANG_SECONDS = 20.0
"""Default time without response after which a core is considered hanging; far above the duration of any step."""
_TICKS = 4
"""Number of checks in `hang_seconds`. Checks are counted instead of time, in case this event loop is delayed."""
_BUSY_FACTOR = 10
"""Factor on the time limit while a core is known to work, for example during a long step on a CPU or a reload."""
_BUSY_FRACTION = 0.1
"""CPU usage above which a process counts as working."""


class Heartbeat:
    """Pings a core while a caller waits for it.

    Args:
        ping: a call that a working core responds to between two steps.
        process_ids: returns the process ids of the core.
        on_hang: called once when the core has not responded for too long.
        hang_seconds: time without response after which the core is considered hanging.
        is_computing_trusted: whether CPU usage proves that the core works. A core that waits for an accelerator may
            use a full CPU without progress.

    Concurrency: one event loop.
    """

    def __init__(
        self,
        ping: Callable[[], Awaitable[Any]],
        process_ids: Callable[[], list[int]],
        on_hang: Callable[[], None],
        *,
        hang_seconds: float = HANG_SECONDS,
        is_computing_trusted: bool = False,
    ) -> None:
        self._ping = ping
        self._process_ids = process_ids
        self._on_hang = on_hang
        self._tick_seconds = hang_seconds / _TICKS
        self._is_computing_trusted = is_computing_trusted
        self._watchers = 0
        self._long_calls = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, *, is_long: bool = False) -> Iterator[None]:
        """Return a context in which the core is watched.

        Args:
            is_long: whether the core may be busy for long, for example because it loads weights.
        """
        self._watchers += 1
        self._long_calls += is_long
        if self._task is None:
            self._task = asyncio.create_task(self._run(), name='vllm heartbeat')
        try:
            yield
        finally:
            self._watchers -= 1
            self._long_calls -= is_long
            if not self._watchers:
                self._task.cancel()
                self._task = None

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            response = asyncio.ensure_future(self._ping())
            try:
                if not await self._is_responding(response):
                    self._on_hang()
                    return
            finally:
                response.cancel()
            if response.exception() is not None:
                # The core has exited; vLLM itself reports the exit.
                return

    async def _is_responding(self, response: 'asyncio.Future[Any]') -> bool:
        """Wait for the response; return whether it arrived in time."""
        missed_ticks, used = 0.0, self._cpu_seconds()
        while True:
            done, _ = await asyncio.wait({response}, timeout=self._tick_seconds)
            if done:
                return True
            used, before = self._cpu_seconds(), used
            is_computing = self._is_computing_trusted and used - before > _BUSY_FRACTION * self._tick_seconds
            missed_ticks += 1 / _BUSY_FACTOR if is_computing or self._long_calls else 1
            if missed_ticks >= _TICKS:
                return False

    def _cpu_seconds(self) -> float:
        """Return the CPU time of the core and its child processes."""
        total = 0.0
        for process_id in self._process_ids():
            with suppress(psutil.Error):
                process = psutil.Process(process_id)
                for each in (process, *process.children(recursive=True)):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total
