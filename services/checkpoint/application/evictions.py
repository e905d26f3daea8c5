"""Versions that have left their rings, deleted in the background: those who wait for the new one come first.

What a crash leaves of them does not fit the ring at the next start either, and is deleted then.
"""

import asyncio
from collections.abc import Sequence

import structlog

from services.checkpoint.domain import AdapterVersion
from services.checkpoint.ports import StateStore

_log = structlog.get_logger('store')

_PAUSE_SECONDS = 0.2
"""Samplers take the new version in this time; to give back the memory of the old one costs as much as reading it."""


class Evictions:
    """Deletes what is in no ring any more. Nobody can ask for it by then, and its number is never given again."""

    def __init__(self, store: StateStore) -> None:
        """Delete from `store`."""
        self._store = store
        self._running: set[asyncio.Task[None]] = set()

    def add(self, versions: Sequence[AdapterVersion]) -> None:
        """Delete versions, soon; one that cannot be deleted holds up no other."""
        for version in versions:
            task = asyncio.create_task(self._delete(version), name=f'evict {version.adapter.adapter_id}')
            self._running.add(task)
            task.add_done_callback(self._done)

    async def _delete(self, version: AdapterVersion) -> None:
        await asyncio.sleep(_PAUSE_SECONDS)
        await self._store.delete(version.key)

    def _done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error('an old version stays until the next start', task=task.get_name(), error=str(error))
