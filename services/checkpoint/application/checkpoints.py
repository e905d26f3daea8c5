"""Durable checkpoints: get, verify, list, copy and delete them, and set their lifetime and visibility."""

from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial

from twinkle_services.checkpoint.application.registry import Registry
from twinkle_services.checkpoint.domain import AdapterKey, Checkpoint, CheckpointKey
from twinkle_services.checkpoint.domain.errors import CheckpointIdTaken
from twinkle_services.kit.caller import Caller, require_internal, require_scope
from twinkle_services.kit.paging import Page, SortKey
from twinkle_services.kit.weights import CheckpointTarget, Header


@dataclass(frozen=True, kw_only=True)
class CopyRequest:
    """Describes the checkpoint that a copy creates."""

    adapter_id: str
    """Run to which the copy belongs."""
    name: str
    ttl: timedelta | None
    """Lifetime of the copy; None to keep it indefinitely."""


class Checkpoints:
    """The checkpoints of all tenants."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry

    async def get(self, key: CheckpointKey) -> Checkpoint:
        """Return a checkpoint of the key's tenant, or another tenant's public one without its folder and its labels.

        Raises:
            CheckpointNotFound: The checkpoint does not exist, or the tenant may not read it.
            CheckpointDamaged: The checkpoint's record cannot be read.
        """
        found = self._registry.catalogue.readable_checkpoint(key, now=self._registry.now())
        return found if found.key == key else replace(found, folder='', user_metadata={})

    async def verify(self, key: CheckpointKey) -> Checkpoint:
        """Compare all files of a checkpoint with the digests stored when it was saved, and return the checkpoint.

        A checkpoint that an earlier release saved without digests is returned without a comparison.

        Raises:
            CheckpointNotFound: The checkpoint does not exist, or the tenant may not read it.
            CheckpointDamaged: A file differs or is missing, or the checkpoint's record cannot be read.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        found = await self.get(key)
        readable = self._registry.catalogue.readable_checkpoint(key, now=self._registry.now())
        source = await self._registry.store.open_state(readable.key, is_adapter_only=False)
        await source.close()
        return found

    async def list_page(
        self, caller: Caller, page: Page, *, adapter_id: str
    ) -> tuple[list[Checkpoint], SortKey | None]:
        """Return a page of checkpoints, newest first, and the sort key of its last checkpoint if more follow.

        Args:
            caller: The tenant whose checkpoints are listed.
            page: Size and start of the page.
            adapter_id: Run whose checkpoints are listed; empty for all runs.
        """
        found = self._registry.catalogue.checkpoints(caller.tenant_id, adapter_id=adapter_id, now=self._registry.now())
        rest = [checkpoint for checkpoint in found if page.after is None or _sort_key(checkpoint) < page.after]
        items = rest[: page.size]
        return items, _sort_key(items[-1]) if len(rest) > page.size else None

    async def copy(self, caller: Caller, key: CheckpointKey, request: CopyRequest) -> Checkpoint:
        """Copy a readable checkpoint to one of the caller's runs, and return the copy, which is private.

        If the run already has a checkpoint with this name and the same state, return that checkpoint unchanged.

        Raises:
            InternalOnly: The caller is not a service.
            CheckpointNotFound: The checkpoint does not exist, or the tenant may not read it.
            CheckpointDamaged: The files or the record of the checkpoint differ from the committed ones, or the record
                of an existing checkpoint with the copy's name cannot be read.
            CheckpointExists: The run has a checkpoint with the copy's name and a different state.
            DiskFull, StoreUnavailable: The disk has too little space, or cannot be used at the moment.
        """
        require_internal(caller)
        found = self._registry.catalogue.readable_checkpoint(key, now=self._registry.now())
        source = await self._registry.store.open_state(found.key, is_adapter_only=False)
        try:
            # Labels of another tenant are private.
            labels = found.user_metadata if found.key == key else dict[str, str]()
            target = CheckpointTarget(request.name, step_count=found.step_count, ttl=request.ttl, user_metadata=labels)
            header = Header(request.adapter_id, source.manifest, target)
            return await self._registry.copy_in(AdapterKey(caller.tenant_id, request.adapter_id), header, source)
        finally:
            await source.close()

    async def delete(self, caller: Caller, key: CheckpointKey) -> None:
        """Delete a checkpoint, even if its record cannot be read.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            CheckpointNotFound: The tenant has no such checkpoint.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_scope(caller, 'train')

        async def change() -> None:
            if not self._registry.catalogue.is_damaged(key):
                self._registry.catalogue.checkpoint(key, now=self._registry.now())
            await self._registry.remove_checkpoint(key)

        await self._registry.change(key.adapter, change)

    async def set_ttl(self, caller: Caller, key: CheckpointKey, ttl: timedelta | None) -> Checkpoint:
        """Set a checkpoint's remaining lifetime (None: unlimited) and return the checkpoint.

        Raises:
            ScopeMissing: The API key lacks the scope `train`.
            CheckpointNotFound: The tenant has no such checkpoint.
            CheckpointDamaged: The checkpoint's record cannot be read.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_scope(caller, 'train')

        async def change() -> Checkpoint:
            now = self._registry.now()
            current = self._registry.catalogue.checkpoint(key, now=now)
            return await self._put(replace(current, expire_time=None if ttl is None else now + ttl))

        return await self._registry.change(key.adapter, change)

    async def set_public(self, caller: Caller, key: CheckpointKey, *, is_public: bool) -> Checkpoint:
        """Make a checkpoint readable for all tenants, or for its tenant only, and return it.

        Raises:
            InternalOnly: The caller is not a service.
            CheckpointNotFound: The tenant has no such checkpoint.
            CheckpointDamaged: The checkpoint's record cannot be read.
            CheckpointIdTaken: Another tenant's public checkpoint has the same run and name, and therefore this path.
            StoreUnavailable: The disk cannot be used at the moment.
        """
        require_internal(caller)

        async def change() -> Checkpoint:
            now = self._registry.now()
            current = self._registry.catalogue.checkpoint(key, now=now)
            if is_public and self._registry.catalogue.is_public_elsewhere(key, now=now):
                raise CheckpointIdTaken(key.checkpoint_id)
            return await self._put(replace(current, is_public=is_public))

        # A public path is unique among all tenants, so this lock serializes changes of visibility across tenants.
        all_tenants = AdapterKey('', key.adapter.adapter_id)
        return await self._registry.change(all_tenants, lambda: self._registry.change(key.adapter, change))

    async def delete_expired(self) -> int:
        """Delete the expired checkpoints and return the number of deleted checkpoints."""
        now = self._registry.now()
        checkpoints = self._registry.catalogue.all_checkpoints()
        expired = [checkpoint.key for checkpoint in checkpoints if checkpoint.is_expired(now)]
        return await self._registry.clean_up((key.adapter, partial(self._delete_if_expired, key)) for key in expired)

    async def _delete_if_expired(self, key: CheckpointKey) -> int:
        # The checkpoint may have been deleted, replaced or extended since the list was made.
        if not self._registry.catalogue.is_expired(key, now=self._registry.now()):
            return 0
        await self._registry.remove_checkpoint(key)
        return 1

    async def _put(self, checkpoint: Checkpoint) -> Checkpoint:
        await self._registry.put_checkpoint(checkpoint)
        return checkpoint


def _sort_key(checkpoint: Checkpoint) -> SortKey:
    return checkpoint.create_time.isoformat(timespec='microseconds'), checkpoint.key.checkpoint_id
