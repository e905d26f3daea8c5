"""Delete an adapter; its checkpoints stay."""

from services.kit.caller import Caller
from services.model.application.directory import AdapterDirectory
from services.model.application.execute_operation import ExecuteOperation
from services.model.ports import TrainerBackend


class DeleteAdapter:
    """Frees adapters."""

    def __init__(self, directory: AdapterDirectory, backend: TrainerBackend, execute: ExecuteOperation) -> None:
        """Use the parts given."""
        self._directory = directory
        self._backend = backend
        self._execute = execute

    async def __call__(self, caller: Caller, adapter_id: str) -> None:
        """Delete the caller's adapter; operations that wait find it gone.

        Raises:
            AdapterNotFound: no such adapter of the caller.
        """
        self._directory.remove(caller, adapter_id)
        await self._execute.forget(adapter_id)
        await self._backend.delete_adapter(adapter_id)
