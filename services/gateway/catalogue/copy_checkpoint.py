"""The verb that copies a checkpoint: to its end once it has begun, and once for each key."""

import asyncio
import hashlib
from collections.abc import Awaitable, Callable
from datetime import timedelta
from typing import Protocol

from services.gateway.catalogue.rules import Checkpoint
from services.kit.caller import Caller
from services.kit.ids import new_id

_KEY_BYTES = 16


class Copier(Protocol):
    """Copies within the store, for the current caller."""

    async def copy(self, path: str, *, run_id: str, name: str, ttl: timedelta | None) -> Checkpoint:
        """Return the copy; the same again is the same copy.

        Raises:
            DomainError: the checkpoint service's own.
        """
        ...


class CopyCheckpoint:
    """Copies. A client that leaves stops nothing that has begun: it will ask again, and finds it done."""

    def __init__(self, copier: Copier) -> None:
        """Copy with `copier`."""
        self._copier = copier
        self._running: set[asyncio.Task[Checkpoint]] = set()

    async def __call__(
        self, caller: Caller, path: str, *, name: str, run_id: str = '', key: str = '', ttl: timedelta | None
    ) -> Checkpoint:
        """Return a copy of a checkpoint that the caller may read.

        Args:
            caller: whose copy it is.
            path: of the checkpoint.
            name: of the copy in its run.
            run_id: of the run it belongs to. Empty: a run of its own.
            key: names the request, so that a repeat is the same copy; for one with a run of its own. Empty: none.
            ttl: deletes it after so long. None: it is kept.

        Raises:
            DomainError: the checkpoint service's own.
        """
        run_id = run_id or (_run_of(caller.tenant_id, key) if key else new_id('cp'))
        return await self._to_its_end(lambda: self._copier.copy(path, run_id=run_id, name=name, ttl=ttl))

    async def _to_its_end(self, copy: Callable[[], Awaitable[Checkpoint]]) -> Checkpoint:
        task = asyncio.ensure_future(copy())
        self._running.add(task)
        task.add_done_callback(self._end)
        return await asyncio.shield(task)

    def _end(self, task: asyncio.Task[Checkpoint]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            # Nobody may be left who is told.
            task.exception()


def _run_of(tenant_id: str, key: str) -> str:
    return f'cp-{hashlib.blake2s(f"{tenant_id} {key}".encode(), digest_size=_KEY_BYTES).hexdigest()}'
