"""What became of each checkpoint, for those who follow.

Only the last change of each is kept, so a slow follower costs nothing and misses no outcome.
Deletions are remembered up to a bound; who is further behind has to begin again.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from services.checkpoint.domain.keys import CheckpointKey


@dataclass(frozen=True)
class Change:
    """The last thing that happened to a checkpoint."""

    revision: int
    """Counts every change, from 1."""
    key: CheckpointKey
    is_deletion: bool


class ChangeLog:
    """Changes in the order they happened."""

    def __init__(self, *, deletion_limit: int) -> None:
        """Begin empty, to remember `deletion_limit` deletions."""
        self._deletion_limit = deletion_limit
        self._changes: dict[CheckpointKey, Change] = {}
        self._deletions: dict[CheckpointKey, None] = {}
        self._revision = 0
        self._forgotten = 0

    @property
    def revision(self) -> int:
        """The number of the last change; 0 before the first."""
        return self._revision

    def record(self, key: CheckpointKey, *, is_deletion: bool) -> None:
        """Note a change."""
        self._revision += 1
        # Taken out first, so that a dictionary's order stays that of the revisions.
        self._changes.pop(key, None)
        self._changes[key] = Change(self._revision, key, is_deletion)
        self._deletions.pop(key, None)
        if is_deletion:
            self._deletions[key] = None
            self._forget()

    def knows(self, revision: int) -> bool:
        """Say whether every deletion after `revision` is still remembered."""
        return self._forgotten <= revision <= self._revision

    def after(self, revision: int) -> list[Change]:
        """Return the changes after `revision`, in order."""
        return list(self._newer(revision))[::-1]

    def _newer(self, revision: int) -> Iterator[Change]:
        for change in reversed(self._changes.values()):
            if change.revision <= revision:
                return
            yield change

    def _forget(self) -> None:
        if len(self._deletions) > self._deletion_limit:
            oldest = next(iter(self._deletions))
            del self._deletions[oldest]
            self._forgotten = self._changes.pop(oldest).revision
