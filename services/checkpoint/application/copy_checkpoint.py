"""Copy a checkpoint: a state that the caller may read becomes a checkpoint of its own."""

from dataclasses import dataclass
from datetime import timedelta

from services.checkpoint.application.commit_state import CommitState
from services.checkpoint.application.frames import CheckpointTarget, Header
from services.checkpoint.domain import AdapterKey, Catalogue, Checkpoint, CheckpointKey
from services.checkpoint.ports import StateStore
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.clock import Clock


@dataclass(frozen=True, kw_only=True)
class Copy:
    """What a copy is to be."""

    adapter_id: str
    """The run it belongs to."""
    name: str
    ttl: timedelta | None
    """None: it is kept."""


class CopyCheckpoint:
    """Copies within the store."""

    def __init__(self, commit: CommitState, catalogue: Catalogue, store: StateStore, clock: Clock) -> None:
        """Use the catalogue's records and the store's bytes."""
        self._commit = commit
        self._catalogue = catalogue
        self._store = store
        self._clock = clock

    async def __call__(self, caller: Caller, key: CheckpointKey, copy: Copy) -> Checkpoint:
        """Return the copy; it is private, whatever the other one is.

        Raises:
            ScopeMissing: the caller is no service.
            CheckpointNotFound: there is none that the caller may read.
            CheckpointExists: another state has that name.
        """
        require_internal(caller)
        found = self._catalogue.readable_checkpoint(key, now=self._clock.now())
        source = await self._store.open_state(found.key, is_adapter_only=False)
        try:
            # What another tenant noted on its own is nobody's business.
            labels = found.user_metadata if found.key == key else dict[str, str]()
            target = CheckpointTarget(copy.name, step_count=found.step_count, ttl=copy.ttl, user_metadata=labels)
            header = Header(copy.adapter_id, source.manifest, target)
            return await self._commit.copy_checkpoint(AdapterKey(caller.tenant_id, copy.adapter_id), header, source)
        finally:
            await source.close()
