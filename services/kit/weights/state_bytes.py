"""What can be sent: the bytes of one state, wherever they lie."""

from typing import Protocol

from services.kit.weights.frames import SegmentRef
from twinkle.checkpoint_engine import WeightManifest


class StateBytes(Protocol):
    """The bytes of a state, as its manifest lays them out.

    What was opened stays readable until it is closed, even when it is deleted meanwhile.
    Concurrency: one `read` at a time.
    """

    @property
    def manifest(self) -> WeightManifest:
        """Describes the bytes."""
        ...

    @property
    def segment(self) -> SegmentRef | None:
        """The shared-memory segment that holds exactly these bytes; None where they lie elsewhere."""
        ...

    async def read(self, offset: int, length: int) -> bytes | memoryview:
        """Return `length` bytes from `offset` on, fewer only at the end."""
        ...

    async def close(self) -> None:
        """Let go of what was opened."""
        ...


class HeldBytes:
    """A state that lies in this process's memory."""

    def __init__(self, manifest: WeightManifest, data: memoryview, *, segment: SegmentRef | None = None) -> None:
        """Read `data`, which `manifest` describes and `segment`, if any, holds."""
        self._manifest = manifest
        self._data = data
        self._segment = segment

    @property
    def manifest(self) -> WeightManifest:
        """Describes the bytes."""
        return self._manifest

    @property
    def segment(self) -> SegmentRef | None:
        """The segment that holds them, if any."""
        return self._segment

    async def read(self, offset: int, length: int) -> memoryview:
        """Return a view of `length` bytes from `offset` on, fewer only at the end."""
        return self._data[offset : offset + length]

    async def close(self) -> None:
        """Nothing was opened."""
