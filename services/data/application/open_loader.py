"""Open and close loaders."""

from dataclasses import dataclass

from services.data.application.ownership import dataset_of
from services.data.domain import DatasetNotReady, Loader
from services.data.ports import DatasetStore, LoaderStore
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import QuotaExceeded, RequestIdReused
from services.kit.ids import new_id


@dataclass(frozen=True, kw_only=True)
class LoaderOrder:
    """What is to be read, and how."""

    request_id: str
    fingerprint: str
    """Digest of the request's content."""
    dataset_id: str
    batch_size: int
    shuffle_seed: int | None
    epoch_count: int
    is_last_partial_dropped: bool


class OpenLoader:
    """Opens loaders."""

    def __init__(self, store: DatasetStore, loaders: LoaderStore, *, limit: int) -> None:
        """Let each tenant have at most `limit` open."""
        self._store, self._loaders, self._limit = store, loaders, limit

    async def __call__(self, caller: Caller, order: LoaderOrder) -> Loader:
        """Return the loader, or that of an earlier request with the same id and content.

        Raises:
            DatasetNotFound: not the caller's.
            DatasetNotReady: it is not encoded.
            RequestIdReused: the request id came before with other content.
            QuotaExceeded: too many are open.
        """
        dataset = dataset_of(self._store, caller, order.dataset_id)
        opened = self._loaders.of_tenant(caller.tenant_id)
        for loader in opened:
            if loader.request_id == order.request_id:
                if loader.fingerprint != order.fingerprint:
                    raise RequestIdReused(order.request_id)
                return loader
        if not dataset.is_encoded:
            problem = 'the dataset is not encoded; apply set_template and encode first'
            raise DatasetNotReady(dataset.dataset_id, 'encode', problem)
        if len(opened) >= self._limit:
            raise QuotaExceeded('open_loaders', self._limit)
        loader = Loader(
            loader_id=new_id('ld'),
            tenant_id=caller.tenant_id,
            dataset_id=dataset.dataset_id,
            content_digest=dataset.content_digest,
            row_count=dataset.row_count,
            batch_size=order.batch_size,
            shuffle_seed=order.shuffle_seed,
            epoch_count=order.epoch_count,
            is_last_partial_dropped=order.is_last_partial_dropped,
            request_id=order.request_id,
            fingerprint=order.fingerprint,
        )
        await self._loaders.save(loader)
        return loader


class CloseLoader:
    """Closes loaders."""

    def __init__(self, loaders: LoaderStore) -> None:
        """Forget what `loaders` keeps."""
        self._loaders = loaders

    async def __call__(self, caller: Caller, loader_id: str) -> None:
        """Close the loader; one that is closed already, or not the caller's, is left as it is.

        Raises:
            ScopeMissing: the key may not.
        """
        require_scope(caller, 'data')
        loader = self._loaders.get(loader_id)
        if loader is not None and loader.tenant_id == caller.tenant_id:
            await self._loaders.delete(loader_id)
