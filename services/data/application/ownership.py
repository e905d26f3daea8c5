"""Whose datasets and loaders: any that is another tenant's is as absent as one that never was."""

from services.data.domain import Dataset, DatasetNotFound, Loader, LoaderNotFound
from services.data.ports import DatasetStore, LoaderStore
from services.kit.authority import require_scope
from services.kit.caller import Caller


def dataset_of(store: DatasetStore, caller: Caller, dataset_id: str) -> Dataset:
    """Return a dataset of the caller's tenant.

    Raises:
        ScopeMissing: the key may not.
        DatasetNotFound: there is none, or it is another tenant's; which, is not told.
    """
    require_scope(caller, 'data')
    dataset = store.get(dataset_id)
    if dataset is None or dataset.tenant_id != caller.tenant_id:
        raise DatasetNotFound(dataset_id)
    return dataset


def loader_of(store: LoaderStore, caller: Caller, loader_id: str) -> Loader:
    """Return a loader of the caller's tenant.

    Raises:
        ScopeMissing: the key may not.
        LoaderNotFound: there is none, or it is another tenant's; which, is not told.
    """
    require_scope(caller, 'data')
    loader = store.get(loader_id)
    if loader is None or loader.tenant_id != caller.tenant_id:
        raise LoaderNotFound(loader_id)
    return loader
