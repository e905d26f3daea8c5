"""A log of changed checkpoints for the streams that follow them.

The log stores only the last change of each checkpoint, so that its size does not depend on slow followers. A slow
follower still receives the last state of every checkpoint. The log contains only a limited number of deletions. A
follower must start again if it missed a deletion that is no longer in the log.
"""

from collections.abc import Iterator
from dataclasses import dataclass

from twinkle_services.checkpoint.domain.keys import CheckpointKey


@dataclass(frozen=True)
class Change:
    """The last change of a checkpoint."""

    revision: int
    """Number of the change, counted from 1."""
    key: CheckpointKey
    is_deletion: bool


class ChangeLog:
    """Changes in the order of their revisions."""

    def __init__(self, *, deletion_limit: int) -> None:
        self._deletion_limit = deletion_limit
        self._changes: dict[CheckpointKey, Change] = {}
        self._deletions: dict[CheckpointKey, None] = {}
        self._revision = 0
        self._trimmed_until = 0

    @property
    def revision(self) -> int:
        """Revision of the last change; 0 before the first."""
        return self._revision

    def record(self, key: CheckpointKey, *, is_deletion: bool) -> None:
        self._revision += 1
        # Removed first, so that the order of the dictionary remains the order of the revisions.
        self._changes.pop(key, None)
        self._changes[key] = Change(self._revision, key, is_deletion)
        self._deletions.pop(key, None)
        if is_deletion:
            self._deletions[key] = None
            self._trim()

    def is_complete_after(self, revision: int) -> bool:
        """Return whether `revision` has been reached and the log still contains every deletion after it."""
        return self._trimmed_until <= revision <= self._revision

    def after(self, revision: int) -> list[Change]:
        """Return the changes after `revision`, in order."""
        return list(self._newer(revision))[::-1]

    def _newer(self, revision: int) -> Iterator[Change]:
        for change in reversed(self._changes.values()):
            if change.revision <= revision:
                return
            yield change

    def _trim(self) -> None:
        if len(self._deletions) > self._deletion_limit:
            oldest = next(iter(self._deletions))
            del self._deletions[oldest]
            self._trimmed_until = self._changes.pop(oldest).revision
