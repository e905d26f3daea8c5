"""Who may use datasets, and which ones."""

from services.data.domain import Dataset, DatasetNotFound, Loader, LoaderNotFound
from services.data.ports import DatasetStore, LoaderStore
from services.kit.caller import Caller
from services.kit.errors import ScopeMissing


def require_data(caller: Caller) -> None:
    """Refuse whoever may not use datasets.

    Raises:
        ScopeMissing: the key lacks the scope.
    """
    if not caller.is_internal and 'data' not in caller.scopes:
        raise ScopeMissing('data')


def dataset_of(store: DatasetStore, caller: Caller, dataset_id: str) -> Dataset:
    """Return a dataset of the caller's tenant.

    Raises:
        ScopeMissing: the key may not.
        DatasetNotFound: there is none, or it is another tenant's; which, is not told.
    """
    require_data(caller)
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
    require_data(caller)
    loader = store.get(loader_id)
    if loader is None or loader.tenant_id != caller.tenant_id:
        raise LoaderNotFound(loader_id)
    return loader
