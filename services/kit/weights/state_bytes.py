"""The port for the bytes of one state, and its implementation in memory."""

from typing import Protocol

from twinkle.checkpoint_engine import WeightManifest
from twinkle_services.kit.weights.frames import SegmentRef


class StateBytes(Protocol):
    """The bytes of a state in the layout of its manifest.

    The bytes stay readable until `close`, even if the state is deleted.
    Concurrency: one `read` at a time.
    """

    @property
    def manifest(self) -> WeightManifest:
        """Manifest of the bytes."""
        ...

    @property
    def segment(self) -> SegmentRef | None:
        """Shared-memory segment with exactly these bytes; None if they are not in one."""
        ...

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes starting at `offset`, or fewer at the end."""
        ...

    async def close(self) -> None:
        """Release the bytes."""
        ...


class BytesInMemory:
    """A state in the memory of this process."""

    def __init__(self, manifest: WeightManifest, data: memoryview, *, segment: SegmentRef | None = None) -> None:
        """Read from `data`, which has the layout of `manifest` and may be mapped from `segment`."""
        self._manifest = manifest
        self._data = data
        self._segment = segment

    @property
    def manifest(self) -> WeightManifest:
        """Manifest of the bytes."""
        return self._manifest

    @property
    def segment(self) -> SegmentRef | None:
        """Shared-memory segment with the bytes; None if they are not in one."""
        return self._segment

    async def read(self, offset: int, length: int) -> memoryview:
        """Return a view of `length` bytes starting at `offset`, or fewer at the end."""
        return self._data[offset : offset + length]

    async def close(self) -> None:
        """Release nothing: the memory belongs to the caller."""
