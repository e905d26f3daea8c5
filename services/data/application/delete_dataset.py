"""Delete a dataset."""

from services.data.application.apply_steps import refuse_while_read
from services.data.application.ownership import dataset_of
from services.data.application.turns import Turns
from services.data.ports import DatasetStore, LoaderStore
from services.kit.caller import Caller


class DeleteDataset:
    """Deletes datasets."""

    def __init__(self, store: DatasetStore, loaders: LoaderStore, *, turns: Turns) -> None:
        """Delete from `store` what no loader reads."""
        self._store, self._loaders, self._turns = store, loaders, turns

    async def __call__(self, caller: Caller, dataset_id: str) -> None:
        """Delete the dataset.

        Raises:
            DatasetNotFound: not the caller's.
            InUse: a loader reads it.
            QueueFull: too many requests wait.
        """
        dataset_of(self._store, caller, dataset_id)
        async with self._turns.of(caller.tenant_id):
            dataset = dataset_of(self._store, caller, dataset_id)
            refuse_while_read(self._loaders, dataset)
            await self._store.delete(dataset)
