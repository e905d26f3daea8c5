"""Lets tasks wait for a change or for short work on the engine, and makes the waits of operations cancellable."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from twinkle_services.kit.errors import Cancelled, DomainError, Draining

_SHORT_WORK_SECONDS = 0.5
"""Maximum time in seconds by which short work delays a pass, for example if a disk is slow."""


class ChangeNotifier:
    """Wakes all tasks that currently wait. Concurrency: use it from one event loop only."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks; tasks that wait later are woken by the next call."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next call of `notify`."""
        await self._next.wait()


class ShortWork:
    """Tracks short work on the engine, such as creating or parking an adapter, which takes several engine calls.

    Within a time limit, no pass starts between these calls. Short work therefore waits only for the pass that runs when
    the work begins.

    Concurrency: use it from one event loop only.
    """

    def __init__(self) -> None:
        self._in_progress: set[asyncio.Future[None]] = set()

    @contextmanager
    def begin(self) -> Iterator[None]:
        """Defer the next pass until the block ends, or until `wait` reaches its limit."""
        done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._in_progress.add(done)
        try:
            yield
        finally:
            self._in_progress.discard(done)
            done.set_result(None)

    async def wait(self) -> None:
        """Wait for the short work in progress, for at most half a second. The same work delays at most one pass."""
        waiting, self._in_progress = self._in_progress, set()
        if waiting:
            await asyncio.wait(waiting, timeout=_SHORT_WORK_SECONDS)


@dataclass(eq=False)
class _Wait:
    """The task of an operation that waits, and the error with which it was cancelled."""

    task: 'asyncio.Task[Any] | None'
    error: DomainError | None = None


class Waits:
    """The waits in progress, one for each adapter. Concurrency: use it from one event loop only."""

    def __init__(self) -> None:
        self._waits: dict[str, _Wait] = {}
        self._is_closed = False

    @contextmanager
    def cancellable(self, adapter_id: str) -> Iterator[None]:
        """Let `cancel` end the block, in which the current task waits on behalf of an adapter's operation.

        Raises:
            Draining: The waits were closed.
            DomainError: The error given to `cancel`.
        """
        if self._is_closed:
            raise Draining()
        self._waits[adapter_id] = wait = _Wait(asyncio.current_task())
        try:
            yield
        except asyncio.CancelledError:
            if wait.error is None:
                raise
        finally:
            del self._waits[adapter_id]
        if wait.error is not None and wait.task is not None:
            # As in `asyncio.timeout`: if the task was also cancelled for another reason, it stays cancelled.
            if wait.task.uncancel():
                raise asyncio.CancelledError
            raise wait.error

    def cancel(self, adapter_id: str, error: DomainError | None = None) -> bool:
        """Cancel the adapter's wait with `error` or Cancelled; return False if there is no wait to cancel."""
        wait = self._waits.get(adapter_id)
        if wait is None or wait.task is None or wait.error is not None:
            return False
        wait.error = error or Cancelled()
        return wait.task.cancel()

    def close(self) -> None:
        """Cancel all waits and refuse new ones."""
        self._is_closed = True
        for adapter_id in list(self._waits):
            self.cancel(adapter_id, Draining())
