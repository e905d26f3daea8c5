"""Waits of operations for their batch or for memory, before they reach the engine. A wait can be cancelled."""

import asyncio
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from services.kit.errors import Cancelled, DomainError, Draining


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
        """Let `cancel` end the block, in which the current task waits for an adapter's operation.

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
        """Cancel the adapter's wait with `error` or Cancelled; return False if it does not wait."""
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
