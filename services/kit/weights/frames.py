"""A transfer's frames as values: what is announced, how its bytes come, and what ends it.

The messages they become are `services.kit.weights.wire`; the bytes of a chunk are the library's
`StateChunk`.
"""

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import timedelta

from twinkle.checkpoint_engine import StateChunk, WeightManifest


class Encoding(enum.Enum):
    """How a state's bytes are sent."""

    WHOLE = 'whole'
    """As they are."""
    DELTA = 'delta'
    """As a delta to a base version; see `twinkle.checkpoint_engine.delta`."""
    SHARED_MEMORY = 'shared_memory'
    """Not at all: both ends open the same segment."""


@dataclass(frozen=True)
class VersionTarget:
    """The state becomes, or is, a version."""

    version: int
    is_pinned: bool = False


@dataclass(frozen=True)
class CheckpointTarget:
    """The state becomes, or is, a durable checkpoint."""

    name: str
    is_overwrite_allowed: bool = False
    step_count: int = 0
    ttl: timedelta | None = None
    """Deleted after this long. None: kept."""
    request_id: str = ''
    """Of the request that it comes from; empty: none was given."""
    user_metadata: Mapping[str, str] = field(default_factory=dict[str, str])
    """The owner's labels."""


@dataclass(frozen=True)
class SegmentRef:
    """A shared-memory segment as one process names it to another."""

    host_id: str
    """Of the memory it lies in; see `Segments.host_id`."""
    name: str
    """Within the folder of segments; never a path."""
    size_bytes: int


@dataclass(frozen=True)
class Header:
    """Announces a state."""

    adapter_id: str
    manifest: WeightManifest
    target: VersionTarget | CheckpointTarget
    resume_offset: int = 0
    """Where the chunks that follow begin, in encoded bytes."""
    encoding: Encoding = Encoding.WHOLE
    base_version: int = 0
    """The version a delta starts from; 0 for the other encodings."""
    delta_size_bytes: int = 0
    """Encoded bytes of a delta; 0 for the other encodings."""
    encoded_digest: str = ''
    """blake3 of a delta's bytes; empty for the other encodings."""
    segment: SegmentRef | None = None
    """Where the bytes lie, for shared memory."""

    @property
    def encoded_size_bytes(self) -> int:
        """Bytes of all chunks from offset 0 on."""
        if self.encoding is Encoding.SHARED_MEMORY:
            return 0
        return self.delta_size_bytes if self.encoding is Encoding.DELTA else self.manifest.size_bytes

    @property
    def resume_digest(self) -> str:
        """What a cut transfer of these bytes is recognised by."""
        return self.encoded_digest or self.manifest.digest

    def resumed(self, offset: int) -> 'Header':
        """Return the same header with chunks from `offset` on."""
        return replace(self, resume_offset=offset)


@dataclass(frozen=True)
class Commit:
    """Ends a state."""

    digest: str


Frame = Header | StateChunk | Commit
