"""Get and list datasets."""

from services.data.application.ownership import dataset_of
from services.data.domain import Dataset
from services.data.ports import DatasetStore
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.paging import Page, SortKey


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

    async def __call__(self, caller: Caller, page: Page) -> tuple[list[Dataset], SortKey | None]:
        """Return a page, newest first, and the sort key of its last dataset if more follow.

        Raises:
            ScopeMissing: the key may not.
        """
        require_scope(caller, 'data')
        # Ids begin with the time they were made, so their order is that of creation.
        owned = sorted(self._store.of_tenant(caller.tenant_id), key=lambda dataset: dataset.dataset_id, reverse=True)
        following = [item for item in owned if page.after is None or _sort_key(item) < page.after]
        items = following[: page.size]
        return items, _sort_key(items[-1]) if len(following) > page.size else None


def _sort_key(dataset: Dataset) -> SortKey:
    return (dataset.dataset_id,)
