"""Watch checkpoints: all of them, then every change. For the gateway's catalogue."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.checkpoint.application.announcements import Announcements
from services.checkpoint.application.commit_state import CHECKPOINTS
from services.checkpoint.domain import Catalogue, Change, Checkpoint, CheckpointKey
from services.kit.authority import require_internal
from services.kit.caller import Caller
from services.kit.errors import InvalidField


@dataclass(frozen=True)
class CheckpointEvent:
    """What became of a checkpoint; `key` is None where it says that the snapshot is complete."""

    resume_token: str
    key: CheckpointKey | None = None
    checkpoint: Checkpoint | None = None
    """As it is now. None: it was deleted."""


class WatchCheckpoints:
    """Follows the checkpoints of all tenants."""

    def __init__(self, catalogue: Catalogue, announcements: Announcements, *, epoch: str) -> None:
        """Use the catalogue.

        Args:
            catalogue: Its changes are what is told.
            announcements: Wakes the watch.
            epoch: Differs at every start of the service, whose changes are counted from 1 each time.
        """
        self._catalogue = catalogue
        self._announcements = announcements
        self._epoch = epoch

    async def __call__(self, caller: Caller, resume_token: str) -> AsyncGenerator[CheckpointEvent, None]:
        """Yield the checkpoints, the mark that these were all, then changes.

        Args:
            caller: A service.
            resume_token: Of the last event seen: only what came after it is told. Empty: all.

        Raises:
            ScopeMissing: the caller is no service.
            Draining: the service ends.
            InvalidField: the token is from before a restart or too old; begin with an empty one.
        """
        require_internal(caller)
        revision = self._parse(resume_token) if resume_token else 0
        is_snapshot = not resume_token
        is_synced = False
        with self._announcements.watch(CHECKPOINTS) as news:
            while True:
                news.clear()
                told_until = self._catalogue.changes.revision
                for change in self._changes(revision, is_snapshot=is_snapshot):
                    yield self._event(change)
                revision, is_snapshot = told_until, False
                if not is_synced:
                    yield CheckpointEvent(self._token(revision))
                    is_synced = True
                await self._announcements.wait(news)

    def _changes(self, revision: int, *, is_snapshot: bool) -> list[Change]:
        changes = self._catalogue.changes
        if is_snapshot:
            return [change for change in changes.after(0) if not change.is_deletion]
        if not changes.knows(revision):
            raise _stale()
        return changes.after(revision)

    def _event(self, change: Change) -> CheckpointEvent:
        # Looked up only now: should it have changed since the list was made, this is the newer fact.
        return CheckpointEvent(self._token(change.revision), change.key, self._catalogue.find(change.key))

    def _token(self, revision: int) -> str:
        return f'{self._epoch}.{revision}'

    def _parse(self, token: str) -> int:
        epoch, _, number = token.rpartition('.')
        if epoch != self._epoch or not number.isdecimal() or not self._catalogue.changes.knows(int(number)):
            raise _stale()
        return int(number)


def _stale() -> InvalidField:
    return InvalidField('resume_token', 'is too old or from before a restart; begin with an empty one')
