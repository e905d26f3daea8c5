"""Notices an engine core that is there and does nothing: stopped, or in a call that never returns.

vLLM tells of a core that ended. One that hangs holds its requests for as long as their callers wait, and the sampler
goes on being given new ones.
"""

import asyncio
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import psutil

HANG_SECONDS = 20.0
"""How long a core may be silent, unless told otherwise; far above any step on an accelerator."""
_TICKS = 4
"""Looks in that time. They are counted, not timed: a loop that was held up itself looks again before it judges."""
_PATIENCE = 10
"""How much longer a core may be silent that is known to work: one long step on a CPU, weights that are loaded."""
_BUSY_SHARE = 0.1
"""A process that uses more of a CPU than this works."""


class Heartbeat:
    """Asks a core for a sign of life for as long as anybody waits for it.

    Concurrency: for one event loop.
    """

    def __init__(
        self,
        ask: Callable[[], Awaitable[Any]],
        process_ids: Callable[[], list[int]],
        on_hang: Callable[[], None],
        *,
        hang_seconds: float = HANG_SECONDS,
        is_computing_trusted: bool = False,
    ) -> None:
        """Ask nobody yet.

        Args:
            ask: a call that the core answers between two steps, soon or never.
            process_ids: of the core.
            on_hang: called once, when the core has been silent for too long.
            hang_seconds: how long that is.
            is_computing_trusted: whether a core that uses a CPU is at work; one that waits for an accelerator may
                use a whole CPU for nothing.
        """
        self._ask = ask
        self._process_ids = process_ids
        self._on_hang = on_hang
        self._tick_seconds = hang_seconds / _TICKS
        self._is_computing_trusted = is_computing_trusted
        self._watchers = 0
        self._long_calls = 0
        self._task: asyncio.Task[None] | None = None

    @contextmanager
    def watching(self, *, is_long: bool = False) -> Iterator[None]:
        """Watch the core within the block.

        Args:
            is_long: the core is busy with something that may take long, such as loading weights.
        """
        self._watchers += 1
        self._long_calls += is_long
        if self._task is None:
            self._task = asyncio.create_task(self._beat(), name='vllm heartbeat')
        try:
            yield
        finally:
            self._watchers -= 1
            self._long_calls -= is_long
            if not self._watchers:
                self._task.cancel()
                self._task = None

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(self._tick_seconds)
            answer = asyncio.ensure_future(self._ask())
            try:
                if not await self._is_answered(answer):
                    self._on_hang()
                    return
            finally:
                answer.cancel()
            if answer.exception() is not None:
                # The core ended, which vLLM tells everybody itself.
                return

    async def _is_answered(self, answer: 'asyncio.Future[Any]') -> bool:
        """Wait for a sign of life; return whether it came in time."""
        silence, used = 0.0, self._cpu_seconds()
        while True:
            done, _ = await asyncio.wait({answer}, timeout=self._tick_seconds)
            if done:
                return True
            used, before = self._cpu_seconds(), used
            is_computing = self._is_computing_trusted and used - before > _BUSY_SHARE * self._tick_seconds
            silence += 1 / _PATIENCE if is_computing or self._long_calls else 1
            if silence >= _TICKS:
                return False

    def _cpu_seconds(self) -> float:
        """Return what the core and its children have used of CPUs."""
        total = 0.0
        for process_id in self._process_ids():
            with suppress(psutil.Error):
                process = psutil.Process(process_id)
                for each in (process, *process.children(recursive=True)):
                    times = each.cpu_times()
                    total += times.user + times.system
        return total
