"""Deletes adapters. Their checkpoints remain stored."""

import asyncio

from services.kit.caller import Caller
from services.kit.errors import AdapterNotFound
from services.model.application.directory import AdapterDirectory
from services.model.application.dispatcher import Dispatcher
from services.model.application.fetch_batch import FetchBatch
from services.model.application.queues import Queues
from services.model.application.residency import Residency
from services.model.domain.adapter import Adapter
from services.model.ports import Journal


class DeleteAdapter:
    """Deletes adapters."""

    def __init__(
        self,
        directory: AdapterDirectory,
        queues: Queues,
        dispatcher: Dispatcher,
        fetch_batch: FetchBatch,
        residency: Residency,
        journal: Journal,
    ) -> None:
        self._directory = directory
        self._dispatcher = dispatcher
        self._fetch_batch = fetch_batch
        self._queues = queues
        self._residency = residency
        self._journal = journal
        self._deletions: set[asyncio.Task[None]] = set()

    async def __call__(self, caller: Caller, adapter_id: str) -> None:
        """Delete the caller's adapter, durably; waiting operations raise AdapterNotFound.

        Cancellation: a deletion that has started completes.

        Raises:
            AdapterNotFound: The caller has no such adapter.
            JournalUnavailable: The deletion could not be recorded; the adapter still exists.
        """
        adapter = self._directory.get(caller, adapter_id)
        # The adapter is removed from the directory first, so that no new operation starts.
        self._directory.remove(caller, adapter_id)
        deletion = asyncio.create_task(self._delete(adapter), name=f'delete-{adapter_id}')
        self._deletions.add(deletion)
        deletion.add_done_callback(self._on_done)
        await asyncio.shield(deletion)

    async def close(self) -> None:
        """Wait for the deletions in progress."""
        while self._deletions:
            await asyncio.wait(self._deletions)

    async def _delete(self, adapter: Adapter) -> None:
        adapter_id, is_done = adapter.adapter_id, False
        try:
            self._dispatcher.cancel(adapter_id, AdapterNotFound(adapter_id))
            self._fetch_batch.cancel(adapter_id, AdapterNotFound(adapter_id))
            self._residency.reject_waiters(adapter_id)
            await self._queues.forget(adapter_id)
            await self._residency.forget(adapter_id)
            await self._journal.remove_adapter(adapter_id)
            is_done = True
        finally:
            if not is_done:
                self._directory.put(adapter)

    def _on_done(self, task: asyncio.Task[None]) -> None:
        self._deletions.discard(task)
        # Retrieve the exception, so that asyncio does not log it; after a failure the adapter is still listed.
        _ = task.cancelled() or task.exception()
