"""Gets, lists, pins and deletes versions of adapters, and collects unused versions."""

from datetime import datetime, timedelta
from functools import partial

from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import AdapterKey, AdapterVersion, NewestMark, VersionKey
from twinkle_services.kit.caller import Caller, require_internal, require_scope
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.kit.paging import Page, SortKey


class Versions:
    """The stored versions of all adapters."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, caller: Caller, adapter_id: str, version: int) -> AdapterVersion:
        """Return a version; 0 selects the newest one.

        Raises:
            AdapterNotFound, VersionNotFound: The caller has no such version.
            CheckpointDamaged: The version's record cannot be read.
        """
        return self._registry.catalogue.ring(AdapterKey(caller.tenant_id, adapter_id)).get(version)

    async def list_page(
        self, caller: Caller, adapter_id: str, page: Page
    ) -> tuple[list[AdapterVersion], SortKey | None]:
        """Return a page of an adapter's versions, newest first, and the sort key of its last version if more follow.

        Raises:
            AdapterNotFound: The caller has no such adapter.
        """
        ring = self._registry.catalogue.ring(AdapterKey(caller.tenant_id, adapter_id))
        found = [item for item in ring.all_newest_first() if page.after is None or (item.version,) < page.after]
        items = found[: page.size]
        return items, (items[-1].version,) if len(found) > page.size else None

    async def pin(self, caller: Caller, adapter_id: str, version: int, *, is_pinned: bool) -> AdapterVersion:
        """Pin or unpin a version and return it; unpinned versions in excess of `ring_capacity` are evicted.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            AdapterNotFound, VersionNotFound: The caller has no such version.
            CheckpointDamaged: The version's record cannot be read.
            QuotaExceeded: The adapter has the maximum number of pins.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_scope(caller, 'train')
        adapter = AdapterKey(caller.tenant_id, adapter_id)

        async def change() -> AdapterVersion:
            changed = self._registry.catalogue.ring(adapter).pinned(version, is_pinned=is_pinned)
            await self._registry.put_version(changed)
            return changed

        return await self._registry.change(adapter, change)

    async def delete(self, caller: Caller, adapter_id: str, version: int) -> None:
        """Delete a version that is neither pinned nor the newest, or one whose record cannot be read.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            AdapterNotFound, VersionNotFound: The caller has no such version.
            InUse: The version is pinned or the newest.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_scope(caller, 'train')
        adapter = AdapterKey(caller.tenant_id, adapter_id)

        async def change() -> None:
            key, catalogue = VersionKey(adapter, version), self._registry.catalogue
            if catalogue.is_damaged(key):
                # A damaged version may have the highest number, which must not be used again after a restart.
                await self._registry.store.mark_newest(NewestMark(adapter, catalogue.highest_version(adapter)))
            else:
                catalogue.ring(adapter).check_removable(version)
            await self._registry.store.delete(key)
            self._registry.catalogue.remove_version(key)

        await self._registry.change(adapter, change)

    async def delete_all(self, caller: Caller, adapter_id: str) -> None:
        """Delete all unpinned versions of an adapter, including the newest; their numbers are not reused.

        If the adapter has no versions, do nothing.

        Raises:
            InternalOnly: The caller is not a service.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_internal(caller)
        adapter = AdapterKey(caller.tenant_id, adapter_id)
        await self._registry.change(adapter, lambda: self._delete_unpinned(adapter))

    async def collect(self, idle: timedelta) -> int:
        """Delete the versions that have not been used for the time `idle`, and return the number of deleted versions.

        Pinned versions, and all versions of an adapter that a stream follows, are not deleted. Without this method, the
        newest version of an adapter that is no longer trained would never be deleted, because a ring evicts its newest
        version only for a newer one.
        """
        adapters = self._registry.catalogue.adapters()
        return await self._registry.clean_up((adapter, partial(self._collect, adapter, idle)) for adapter in adapters)

    async def _collect(self, adapter: AdapterKey, idle: timedelta) -> int:
        if self._registry.announcements.is_watched(adapter):
            return 0
        return await self._delete_unpinned(adapter, unused_since=self._registry.now() - idle)

    async def _delete_unpinned(self, adapter: AdapterKey, *, unused_since: datetime | None = None) -> int:
        """Delete an adapter's unpinned versions, or only those not used since `unused_since`; return their number."""
        store = self._registry.store
        try:
            ring = self._registry.catalogue.ring(adapter)
        except AdapterNotFound:
            return 0
        deleted = [
            version
            for version in ring.all_newest_first()
            if not version.is_pinned and (unused_since is None or store.last_use(version) < unused_since)
        ]
        if ring.newest in deleted:
            # The mark is written first: version numbers must not restart if the service crashes before the deletion.
            await store.mark_newest(NewestMark(adapter, ring.highest))
        for version in reversed(deleted):
            await store.delete(version.key)
            ring.remove(version.version)
        return len(deleted)
