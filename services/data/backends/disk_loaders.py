"""Stores open loaders on the local disk, so that their cursors remain valid after a restart."""

from contextlib import suppress
from pathlib import Path

from twinkle_services.data.backends.record_files import RecordFiles
from twinkle_services.data.domain import Loader
from twinkle_services.kit.errors import StoredDataDamaged, StoreUnavailable
from twinkle_services.kit.worker import Threads, completed


class DiskLoaders:
    """Stores loaders below one folder; implements `LoaderStore`."""

    def __init__(self, root: Path, threads: Threads) -> None:
        """Open the store at `root`, including loaders of earlier runs."""
        self._root, self._threads = root, threads
        self._records = RecordFiles(Loader)
        root.mkdir(parents=True, exist_ok=True)
        found = dict(self._records.read_all(root, '*.json'))
        self._known = {loader.loader_id: loader for loader in found.values() if loader is not None}
        self._damaged = {path.stem for path, loader in found.items() if loader is None}

    def get(self, loader_id: str) -> Loader | None:
        if loader_id in self._damaged:
            raise StoredDataDamaged('loader', loader_id)
        return self._known.get(loader_id)

    def of_tenant(self, tenant_id: str) -> list[Loader]:
        return [loader for loader in self._known.values() if loader.tenant_id == tenant_id]

    async def save(self, loader: Loader) -> None:
        # `_known` must match the disk even if the caller is cancelled.
        await completed(self._save(loader))

    async def delete(self, loader_id: str) -> None:
        await completed(self._delete(loader_id))

    async def _save(self, loader: Loader) -> None:
        # The loader is added before it is written, so that a repeated request finds it during the write.
        self._known[loader.loader_id] = loader
        try:
            await self._threads.run(self._records.write, self._path(loader.loader_id), loader)
        except StoreUnavailable:
            del self._known[loader.loader_id]
            with suppress(StoreUnavailable):
                await self._remove(loader.loader_id)
            raise

    async def _delete(self, loader_id: str) -> None:
        await self._remove(loader_id)
        self._known.pop(loader_id, None)

    async def _remove(self, loader_id: str) -> None:
        await self._threads.run(self._path(loader_id).unlink, missing_ok=True)

    def _path(self, loader_id: str) -> Path:
        return self._root / f'{loader_id}.json'
