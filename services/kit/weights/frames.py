"""The frames of a transfer: a header that announces the state, chunks with its bytes, and a commit.

Chunks are the library's `StateChunk`. `twinkle_services.kit.weights.wire` converts frames to messages.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta

from twinkle.checkpoint_engine import Rendezvous, StateChunk, WeightManifest


class Encoding(enum.Enum):
    """Encoding of the bytes of a state."""

    WHOLE = 'whole'
    """The unchanged bytes."""
    DELTA = 'delta'
    """A delta against a base version; see `twinkle.checkpoint_engine.delta`."""
    SHARED_MEMORY = 'shared_memory'
    """No bytes are sent: both ends open the same shared-memory segment."""
    DEVICE = 'device'
    """The bytes are sent over a device transport; see `twinkle.checkpoint_engine.transport`."""


@dataclass(frozen=True)
class VersionTarget:
    """Identifies a state as an adapter version."""

    version: int
    is_pinned: bool = False
    publish_time: datetime | None = None
    """Time at which the version was committed; None in requests."""


@dataclass(frozen=True)
class CheckpointTarget:
    """Identifies a state as a durable checkpoint."""

    name: str
    is_overwrite_allowed: bool = False
    step_count: int = 0
    ttl: timedelta | None = None
    """Time after which the checkpoint is deleted; None for never."""
    request_id: str = ''
    """Id of the request that creates the checkpoint; empty if the caller gave none."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """Labels that the caller attached to the checkpoint."""


@dataclass(frozen=True)
class SegmentRef:
    """Identifies a shared-memory segment to another process."""

    host_id: str
    """Id of the memory that contains the segment; see `Segments.host_id`."""
    name: str
    """File name within the folder of segments; never a path."""
    size_bytes: int


@dataclass(frozen=True)
class DeviceTransfer:
    """A pending transfer over a device transport."""

    transport: str
    """Name of the transport."""
    rendezvous: Rendezvous
    piece_bytes: int
    """Size of all pieces but the last."""


@dataclass(frozen=True)
class Header:
    """The first frame of a transfer, which announces the state."""

    adapter_id: str
    manifest: WeightManifest
    target: VersionTarget | CheckpointTarget
    resume_offset: int = 0
    """Position of the first chunk, in encoded bytes."""
    encoding: Encoding = Encoding.WHOLE
    base_version: int = 0
    """Base version of a delta; 0 for the other encodings."""
    delta_size_bytes: int = 0
    """Size of a delta in encoded bytes; 0 for the other encodings."""
    encoded_digest: str = ''
    """blake3 digest of a delta's bytes; empty for the other encodings."""
    segment: SegmentRef | None = None
    """Segment that contains the bytes for SHARED_MEMORY; None for the other encodings."""
    device: DeviceTransfer | None = None
    """Transfer of the bytes for DEVICE; None for the other encodings."""

    @property
    def encoded_size_bytes(self) -> int:
        """Total size of all chunks, counted from offset 0."""
        if self.encoding in (Encoding.SHARED_MEMORY, Encoding.DEVICE):
            return 0
        return self.delta_size_bytes if self.encoding is Encoding.DELTA else self.manifest.size_bytes

    @property
    def resume_digest(self) -> str:
        """Digest that identifies the encoded bytes when a transfer is resumed."""
        return self.encoded_digest or self.manifest.digest

    def resumed(self, offset: int) -> 'Header':
        """Return the same header for a transfer whose chunks start at `offset`."""
        return replace(self, resume_offset=offset)


@dataclass(frozen=True)
class Commit:
    """The last frame of a transfer, with the digest of the state."""

    digest: str


Frame = Header | StateChunk | Commit
