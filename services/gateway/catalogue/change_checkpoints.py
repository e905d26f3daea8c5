"""The verbs that change checkpoints: where they are kept, and in the catalogue at once.

The catalogue would hear of the change a moment later; who asked for it shall find it there at once.
"""

from collections.abc import Callable
from datetime import timedelta

from services.gateway.catalogue.ports import CheckpointKeeper, CheckpointStore
from services.gateway.catalogue.rules import Checkpoint
from services.kit.caller import Caller
from services.kit.clock import Clock


class ChangeCheckpoints:
    """Changes checkpoints of the current caller."""

    def __init__(
        self, keeper: CheckpointKeeper, catalogue: CheckpointStore, *, caller: Callable[[], Caller], clock: Clock
    ) -> None:
        """Change what `keeper` has of the `caller`, and what `catalogue` tells of it."""
        self._keeper = keeper
        self._catalogue = catalogue
        self._caller = caller
        self._clock = clock

    async def delete(self, path: str) -> None:
        """Delete one.

        Raises:
            CheckpointNotFound: the caller has none of that path.
        """
        await self._keeper.delete(path)
        # The catalogue knows it by what follows the scheme.
        key = self._caller().tenant_id, path.partition('://')[2]
        await self._catalogue.mark_gone(key, moment=self._clock.now())

    async def set_ttl(self, path: str, ttl: timedelta | None) -> Checkpoint:
        """Return one, to be deleted after `ttl` from now; None keeps it.

        Raises:
            CheckpointNotFound: the caller has none of that path.
        """
        return await self._told(await self._keeper.set_ttl(path, ttl))

    async def set_public(self, path: str, *, is_public: bool) -> Checkpoint:
        """Return one, to be read by every tenant from now on, or by the caller's alone.

        Raises:
            CheckpointNotFound: the caller has none of that path.
            DomainError: ID_TAKEN: another tenant's of that path is public.
        """
        return await self._told(await self._keeper.set_public(path, is_public=is_public))

    async def _told(self, changed: Checkpoint) -> Checkpoint:
        await self._catalogue.save(changed)
        return changed
