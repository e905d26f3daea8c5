"""Delete an adapter; its checkpoints stay."""

from services.kit.caller import Caller
from services.model.application.directory import AdapterDirectory
from services.model.application.queues import Queues
from services.model.application.residency import Residency
from services.model.ports import Journal


class DeleteAdapter:
    """Frees adapters."""

    def __init__(self, directory: AdapterDirectory, queues: Queues, residency: Residency, journal: Journal) -> None:
        """Use the parts given."""
        self._directory = directory
        self._queues = queues
        self._residency = residency
        self._journal = journal

    async def __call__(self, caller: Caller, adapter_id: str) -> None:
        """Delete the caller's adapter, durably; operations that wait find it gone.

        Raises:
            AdapterNotFound: no such adapter of the caller.
            JournalUnavailable: it is still there.
        """
        adapter = self._directory.get(caller, adapter_id)
        # First of all, so that nothing new begins while what runs comes to its end.
        self._directory.remove(caller, adapter_id)
        await self._queues.forget(adapter_id)
        is_done = False
        try:
            await self._residency.forget(adapter_id)
            await self._journal.remove_adapter(adapter_id)
            is_done = True
        finally:
            if not is_done:
                self._directory.put(adapter)
