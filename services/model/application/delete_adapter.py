"""Deletes adapters for their owners, with their unpinned versions, and removes unused adapters.

Checkpoints and pinned versions remain stored. If an adapter is removed because it is unused, all its versions remain.
"""

import asyncio
from collections.abc import Coroutine
from typing import Any

import structlog

from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, DomainError
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.application.dispatcher import Dispatcher
from twinkle_services.model.application.queues import Queues
from twinkle_services.model.application.residency import Residency
from twinkle_services.model.application.waits import Waits
from twinkle_services.model.domain.adapter import Adapter, ExpiredAdapter
from twinkle_services.model.ports import Ports

_log = structlog.get_logger('adapters')


class DeleteAdapter:
    """Deletes adapters for their owners, and removes unused ones."""

    def __init__(
        self,
        directory: AdapterDirectory,
        queues: Queues,
        dispatcher: Dispatcher,
        waits: Waits,
        residency: Residency,
        ports: Ports,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._waits = waits
        self._queues = queues
        self._residency = residency
        self._ports = ports
        self._deletions: set[asyncio.Task[None]] = set()

    async def __call__(self, caller: Caller, adapter_id: str) -> None:
        """Delete the caller's adapter durably, even a damaged one. Waiting operations raise AdapterNotFound.

        Cancellation: a deletion that has started completes.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            AdapterNotFound, AdapterExpired: The caller has no such adapter, or the adapter was unused and removed.
            JournalUnavailable: The deletion could not be recorded; the adapter still exists.
        """
        if self._directory.is_damaged(caller, adapter_id):
            deletion = self._delete_damaged(adapter_id)
        else:
            adapter = self._directory.get(caller, adapter_id)
            # The adapter is removed from the directory first, so that no new operation starts.
            self._directory.remove(caller, adapter_id)
            deletion = self._delete(adapter)
        deletion = self._then_delete_versions(adapter_id, deletion)
        await asyncio.shield(self._start(deletion, name=f'delete-{adapter_id}'))

    async def expire(self, adapter: Adapter) -> bool:
        """Remove an unused adapter and record its checkpoint durably.

        The adapter's versions remain, because samplers may use them. The checkpoint service deletes unused ones.

        Cancellation: a removal that has started completes.

        Returns:
            Whether the adapter was removed; False if it was used, changed or deleted since `adapter` was read.

        Raises:
            JournalUnavailable: The removal could not be recorded; the adapter still exists.
        """
        adapter_id = adapter.adapter_id
        if self._directory.find(adapter_id) != adapter or self._queues.is_in_use(adapter_id):
            return False
        expired = ExpiredAdapter(
            adapter_id=adapter_id, tenant_id=adapter.tenant_id, checkpoint_path=adapter.checkpoint_path
        )
        self._directory.expire(expired)
        await asyncio.shield(self._start(self._delete(adapter, expired), name=f'expire-{adapter_id}'))
        return True

    async def close(self) -> None:
        """Wait for the deletions in progress."""
        while self._deletions:
            await asyncio.wait(self._deletions)

    async def _delete(self, adapter: Adapter, expired: ExpiredAdapter | None = None) -> None:
        adapter_id, is_done = adapter.adapter_id, False
        try:
            self._dispatcher.cancel(adapter_id, AdapterNotFound(adapter_id))
            self._waits.cancel(adapter_id, AdapterNotFound(adapter_id))
            with self._residency.short_work.begin():
                await self._queues.forget(adapter_id)
                await self._residency.forget(adapter_id)
            await self._ports.journal.remove_adapter(adapter_id, expired=expired)
            is_done = True
        finally:
            if not is_done:
                self._directory.put(adapter)

    async def _delete_damaged(self, adapter_id: str) -> None:
        """Delete an adapter whose record cannot be read, and which therefore has no operations."""
        await self._ports.journal.remove_adapter(adapter_id)
        self._directory.remove_damaged(adapter_id)

    async def _then_delete_versions(self, adapter_id: str, deletion: Coroutine[Any, Any, None]) -> None:
        """Complete the deletion of an adapter, and start to delete its versions in the background."""
        await deletion
        self._start(self._delete_versions(adapter_id), name=f'delete-versions-{adapter_id}')

    async def _delete_versions(self, adapter_id: str) -> None:
        """Delete the adapter's versions. After a failure, the checkpoint service deletes them when they are unused."""
        try:
            await self._ports.store.delete_versions(adapter_id)
        except DomainError as error:
            _log.warning('versions of a deleted adapter remain', adapter_id=adapter_id, error=str(error))

    def _start(self, deletion: Coroutine[Any, Any, None], *, name: str) -> asyncio.Task[None]:
        task = asyncio.create_task(deletion, name=name)
        self._deletions.add(task)
        task.add_done_callback(self._on_done)
        return task

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._deletions.discard(task)
        # Retrieve the exception, so that asyncio does not log it. After a failure, the adapter still exists.
        _ = task.cancelled() or task.exception()
