"""Deletes evicted versions in the background, so that the deletion does not delay the readers of the new version.

If a crash prevents a deletion, the version exceeds `ring_capacity` at the next start and is deleted then.
"""

import asyncio
from collections.abc import Sequence

import structlog

from twinkle_services.checkpoint.domain import AdapterVersion
from twinkle_services.checkpoint.ports import StateStore

_log = structlog.get_logger('store')

_DELAY_SECONDS = 0.2
"""Delay before a deletion, so that samplers fetch the new version first; releasing the old version's memory is slow."""


class Evictions:
    """Deletes evicted versions, which the catalogue no longer contains and whose numbers are not reused."""

    def __init__(self, store: StateStore) -> None:
        self._store = store
        self._running: set[asyncio.Task[None]] = set()

    def add(self, versions: Sequence[AdapterVersion]) -> None:
        """Start to delete versions in the background; a failed deletion does not affect the others."""
        for version in versions:
            task = asyncio.create_task(self._delete(version), name=f'evict {version.adapter.adapter_id}')
            self._running.add(task)
            task.add_done_callback(self._on_done)

    async def _delete(self, version: AdapterVersion) -> None:
        await asyncio.sleep(_DELAY_SECONDS)
        await self._store.delete(version.key)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._running.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            _log.error('eviction failed; retrying at the next start', task=task.get_name(), error=str(error))
