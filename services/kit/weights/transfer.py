"""Validation of the order of a transfer's frames: one header, chunks, one commit."""

import enum

from twinkle_services.kit.errors import StreamOutOfOrder
from twinkle_services.kit.weights.frames import Commit, Frame, Header


class FrameKind(enum.Enum):
    """Kind of a frame."""

    HEADER = 'header'
    CHUNK = 'chunk'
    COMMIT = 'commit'

    @classmethod
    def of(cls, frame: Frame) -> 'FrameKind':
        """Return the kind of a frame."""
        if isinstance(frame, Header):
            return cls.HEADER
        return cls.COMMIT if isinstance(frame, Commit) else cls.CHUNK


class Transfer:
    """Checks the order of the frames of one transfer; call `accept` before using a frame."""

    def __init__(self) -> None:
        self._is_begun = False
        self._is_committed = False

    @property
    def is_committed(self) -> bool:
        """Whether the commit was received."""
        return self._is_committed

    def accept(self, kind: FrameKind) -> None:
        """Accept the next frame.

        Raises:
            StreamOutOfOrder: The frame is not allowed at this point.
        """
        if self._is_committed:
            raise StreamOutOfOrder('no further frame, because the commit is the last one')
        if not self._is_begun and kind is not FrameKind.HEADER:
            raise StreamOutOfOrder('a header')
        if self._is_begun and kind is FrameKind.HEADER:
            raise StreamOutOfOrder('a chunk or the commit')
        self._is_begun = True
        self._is_committed = kind is FrameKind.COMMIT

    def end(self) -> None:
        """Check at the end of the stream that the transfer is complete.

        Raises:
            StreamOutOfOrder: The commit is missing.
        """
        if not self._is_committed:
            raise StreamOutOfOrder('a chunk or the commit' if self._is_begun else 'a header')
