"""The order of a transfer's frames: header, chunks, commit, and then nothing more."""

import enum

from services.kit.errors import StreamOutOfOrder
from services.kit.weights.frames import Commit, Frame, Header


class FrameKind(enum.Enum):
    """What a frame is."""

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
    """Where a transfer is; told of each frame before the frame is used."""

    def __init__(self) -> None:
        """Expect a header."""
        self._is_begun = False
        self._is_committed = False

    @property
    def is_committed(self) -> bool:
        """Whether the commit has come."""
        return self._is_committed

    def accept(self, kind: FrameKind) -> None:
        """Move on.

        Raises:
            StreamOutOfOrder: this frame may not come now.
        """
        if self._is_committed:
            raise StreamOutOfOrder('its end: the commit was the last frame')
        if not self._is_begun and kind is not FrameKind.HEADER:
            raise StreamOutOfOrder('a header')
        if self._is_begun and kind is FrameKind.HEADER:
            raise StreamOutOfOrder('a chunk or the commit')
        self._is_begun = True
        self._is_committed = kind is FrameKind.COMMIT

    def end(self) -> None:
        """Take note that no more frames come.

        Raises:
            StreamOutOfOrder: the commit has not come.
        """
        if not self._is_committed:
            raise StreamOutOfOrder('a chunk or the commit' if self._is_begun else 'a header')
