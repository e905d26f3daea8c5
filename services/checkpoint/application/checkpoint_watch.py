"""A watch over the checkpoints of all tenants: a snapshot, then the changes. The gateway's catalogue uses it."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from twinkle_services.checkpoint.application.registry import CHECKPOINTS, Registry
from twinkle_services.checkpoint.domain import Change, Checkpoint, CheckpointKey
from twinkle_services.kit.caller import Caller, require_internal
from twinkle_services.kit.errors import InvalidField


@dataclass(frozen=True)
class CheckpointEvent:
    """A checkpoint of the snapshot, or a change; without `key`, the end of the snapshot or of the missed changes."""

    resume_token: str
    """Token with which a later call resumes after this event; empty for a damaged checkpoint."""
    key: CheckpointKey | None = None
    checkpoint: Checkpoint | None = None
    """Current state of the checkpoint; None if it was deleted or is damaged."""
    is_damaged: bool = False
    """Whether the record of the checkpoint cannot be read."""


class CheckpointWatch:
    """Follows the checkpoints of all tenants."""

    def __init__(self, registry: Registry, *, epoch: str) -> None:
        """Create a watch.

        Args:
            registry: Checkpoints to follow.
            epoch: A value that differs at every start of the service, since revisions restart from 1 each time.
        """
        self._registry = registry
        self._epoch = epoch

    async def watch(self, caller: Caller, resume_token: str) -> AsyncGenerator[CheckpointEvent, None]:
        """Yield all checkpoints, an event that marks the end of the snapshot, and then the changes.

        With a resume token, the changes after the token replace the snapshot. If a checkpoint changes several times
        before the caller reads on, only its last change is sent.

        Args:
            caller: Caller, which must be a service of this deployment.
            resume_token: Token of the last event received, to receive only later changes; empty for a new snapshot.

        Raises:
            InternalOnly: The caller is not a service.
            Draining: The service is shutting down.
            InvalidField: The token is malformed, was issued before a restart, or was followed by more deletions than
                are stored; start with an empty token. A slow reader may receive this error later, too.
        """
        require_internal(caller)
        revision = self._parse(resume_token) if resume_token else 0
        is_snapshot = not resume_token
        is_synced = False
        with self._registry.announcements.watch(CHECKPOINTS) as changed:
            while True:
                changed.clear()
                next_revision = self._registry.catalogue.changes.revision
                for change in self._changes(revision, is_snapshot=is_snapshot):
                    yield self._event(change)
                for key in self._registry.catalogue.damaged_checkpoints() if is_snapshot else ():
                    yield CheckpointEvent('', key, is_damaged=True)
                revision, is_snapshot = next_revision, False
                if not is_synced:
                    yield CheckpointEvent(self._token(revision))
                    is_synced = True
                await self._registry.announcements.wait(changed)

    def _changes(self, revision: int, *, is_snapshot: bool) -> list[Change]:
        changes = self._registry.catalogue.changes
        if is_snapshot:
            return [change for change in changes.after(0) if not change.is_deletion]
        if not changes.is_complete_after(revision):
            raise _stale()
        return changes.after(revision)

    def _event(self, change: Change) -> CheckpointEvent:
        # The checkpoint is looked up when the event is sent, so the event contains its latest state.
        found = self._registry.catalogue.find(change.key)
        return CheckpointEvent(self._token(change.revision), change.key, found)

    def _token(self, revision: int) -> str:
        return f'{self._epoch}.{revision}'

    def _parse(self, token: str) -> int:
        epoch, _, number = token.rpartition('.')
        changes = self._registry.catalogue.changes
        if epoch != self._epoch or not number.isdecimal() or not changes.is_complete_after(int(number)):
            raise _stale()
        return int(number)


def _stale() -> InvalidField:
    return InvalidField('resume_token', 'is too old or from before a restart; start with an empty token')
