"""Get and list datasets."""

from services.data.application.ownership import dataset_of
from services.data.domain import Dataset
from services.data.ports import DatasetStore
from services.kit.authority import require_scope
from services.kit.caller import Caller


class GetDataset:
    """Finds a dataset."""

    def __init__(self, store: DatasetStore) -> None:
        """Look in `store`."""
        self._store = store

    async def __call__(self, caller: Caller, dataset_id: str) -> Dataset:
        """Return the dataset.

        Raises:
            DatasetNotFound: not the caller's.
        """
        return dataset_of(self._store, caller, dataset_id)


class ListDatasets:
    """Lists a tenant's datasets."""

    def __init__(self, store: DatasetStore) -> None:
        """Look in `store`."""
        self._store = store

    async def __call__(self, caller: Caller, *, size: int, before: str | None) -> tuple[list[Dataset], str | None]:
        """Return a page, newest first, and the id of its last dataset if more follow.

        Args:
            size: most to return.
            before: id of the last dataset of the page before; None for the first page.

        Raises:
            ScopeMissing: the key may not.
        """
        require_scope(caller, 'data')
        # Ids begin with the time they were made, so their order is that of creation.
        owned = sorted(self._store.of_tenant(caller.tenant_id), key=lambda dataset: dataset.dataset_id, reverse=True)
        following = [dataset for dataset in owned if before is None or dataset.dataset_id < before]
        page = following[:size]
        return page, page[-1].dataset_id if len(following) > size else None
