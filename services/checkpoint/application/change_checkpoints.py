"""Delete checkpoints, by wish or because their time is over, set that time, and set who may read them."""

from dataclasses import replace
from datetime import timedelta

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.commit_state import CHECKPOINTS
from services.checkpoint.application.exclusive import Exclusive
from services.checkpoint.domain import AdapterKey, Catalogue, Checkpoint, CheckpointKey
from services.checkpoint.domain.errors import CheckpointIdTaken
from services.checkpoint.ports import StateStore
from services.kit.authority import require_internal, require_scope
from services.kit.caller import Caller
from services.kit.clock import Clock


class ChangeCheckpoints:
    """The changes to checkpoints that exist."""

    def __init__(
        self,
        catalogue: Catalogue,
        store: StateStore,
        *,
        clock: Clock,
        announcements: Announcements,
        exclusive: Exclusive,
    ) -> None:
        """Use the ports and the service's shared objects."""
        self._catalogue = catalogue
        self._store = store
        self._clock = clock
        self._announcements = announcements
        self._exclusive = exclusive

    async def delete(self, caller: Caller, key: CheckpointKey) -> None:
        """Delete a checkpoint.

        Raises:
            ScopeMissing: the key may not.
            CheckpointNotFound: it is not here.
        """
        require_scope(caller, 'train')

        async def change() -> None:
            self._catalogue.checkpoint(key, now=self._clock.now())
            await self._remove(key)

        await self._exclusive.run(key.adapter, change)

    async def set_ttl(self, caller: Caller, key: CheckpointKey, ttl: timedelta | None) -> Checkpoint:
        """Return the checkpoint, to be deleted after `ttl` from now; None keeps it.

        Raises:
            ScopeMissing: the key may not.
            CheckpointNotFound: it is not here.
        """
        require_scope(caller, 'train')

        async def change() -> Checkpoint:
            now = self._clock.now()
            held = self._catalogue.checkpoint(key, now=now)
            return await self._keep(replace(held, expire_time=None if ttl is None else now + ttl))

        return await self._exclusive.run(key.adapter, change)

    async def set_public(self, caller: Caller, key: CheckpointKey, *, is_public: bool) -> Checkpoint:
        """Return the checkpoint, to be read by every tenant from now on, or by its owner alone.

        Raises:
            ScopeMissing: the caller is no service.
            CheckpointNotFound: it is not here.
            CheckpointIdTaken: another tenant's checkpoint of that run and name is public, so that the path is its.
        """
        require_internal(caller)

        async def change() -> Checkpoint:
            now = self._clock.now()
            held = self._catalogue.checkpoint(key, now=now)
            if is_public and self._catalogue.is_public_elsewhere(key, now=now):
                raise CheckpointIdTaken(key.checkpoint_id)
            return await self._keep(replace(held, is_public=is_public))

        # A public path is one over all tenants: of two that publish the same at once, the second finds it taken.
        everyone = AdapterKey('', key.adapter.adapter_id)
        return await self._exclusive.run(everyone, lambda: self._exclusive.run(key.adapter, change))

    async def delete_expired(self) -> int:
        """Delete every checkpoint whose time is over and return how many there were."""
        now = self._clock.now()
        expired = [checkpoint.key for checkpoint in self._catalogue.all_checkpoints() if checkpoint.is_expired(now)]
        for key in expired:
            await self._exclusive.run(key.adapter, lambda key=key: self._remove_if_expired(key))
        return len(expired)

    async def _keep(self, changed: Checkpoint) -> Checkpoint:
        await self._store.update(changed)
        self._catalogue.put_checkpoint(changed)
        self._announcements.announce(CHECKPOINTS)
        return changed

    async def _remove_if_expired(self, key: CheckpointKey) -> None:
        # It may have been deleted, replaced or given more time since the list was made.
        if self._catalogue.is_expired(key, now=self._clock.now()):
            await self._remove(key)

    async def _remove(self, key: CheckpointKey) -> None:
        await self._store.delete(key)
        self._catalogue.remove_checkpoint(key)
        self._announcements.announce(CHECKPOINTS)
