"""Pin, unpin and delete versions."""

from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.domain import AdapterKey, AdapterVersion, Catalogue
from services.checkpoint.ports import StateStore
from services.kit.authority import require_scope
from services.kit.caller import Caller


class PinVersion:
    """Keeps a version until it is unpinned, and lets it go again."""

    def __init__(self, catalogue: Catalogue, store: StateStore, exclusive: Exclusive) -> None:
        """Use the catalogue and the store."""
        self._catalogue = catalogue
        self._store = store
        self._exclusive = exclusive

    async def __call__(self, caller: Caller, adapter_id: str, version: int, *, is_pinned: bool) -> AdapterVersion:
        """Return the version as it is now. Unpinned, it leaves when newer ones take its place.

        Raises:
            ScopeMissing: the key may not.
            AdapterNotFound, VersionNotFound: it is not here.
            QuotaExceeded: as many as may be are pinned.
        """
        require_scope(caller, 'train')
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        return await self._exclusive.run(adapter, lambda: self._pin(adapter, version, is_pinned=is_pinned))

    async def _pin(self, adapter: AdapterKey, version: int, *, is_pinned: bool) -> AdapterVersion:
        changed = self._catalogue.ring(adapter).pinned(version, is_pinned=is_pinned)
        await self._store.update(changed)
        for evicted in self._catalogue.add_version(changed):
            await self._store.delete(evicted.key)
        return changed


class DeleteVersion:
    """Deletes a version that is neither the newest nor pinned."""

    def __init__(self, catalogue: Catalogue, store: StateStore, exclusive: Exclusive) -> None:
        """Use the catalogue and the store."""
        self._catalogue = catalogue
        self._store = store
        self._exclusive = exclusive

    async def __call__(self, caller: Caller, adapter_id: str, version: int) -> None:
        """Delete it.

        Raises:
            ScopeMissing: the key may not.
            AdapterNotFound, VersionNotFound: it is not here.
            InUse: it is the newest or pinned.
        """
        require_scope(caller, 'train')
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        await self._exclusive.run(adapter, lambda: self._delete(adapter, version))

    async def _delete(self, adapter: AdapterKey, version: int) -> None:
        held = self._catalogue.ring(adapter).check_removable(version)
        await self._store.delete(held.key)
        self._catalogue.ring(adapter).remove(held.version)
