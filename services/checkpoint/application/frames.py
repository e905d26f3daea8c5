"""A transfer's frames as values, and the frames of a state that is sent."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from datetime import timedelta

from services.checkpoint.domain import Checkpoint, Record
from services.checkpoint.ports import StateSource
from services.kit.errors import InvalidField
from twinkle.checkpoint_engine import CHUNK_BYTES, StateChunk, WeightManifest, chunk_checksum


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


@dataclass(frozen=True)
class Header:
    """Announces a state."""

    adapter_id: str
    manifest: WeightManifest
    target: VersionTarget | CheckpointTarget
    resume_offset: int = 0
    """Where the chunks that follow begin, in bytes."""


@dataclass(frozen=True)
class Commit:
    """Ends a state."""

    digest: str


Frame = Header | StateChunk | Commit


async def frames_of(record: Record, source: StateSource, *, offset: int, field: str) -> AsyncGenerator[Frame, None]:
    """Yield the frames of a state from a byte on.

    One chunk is in memory at a time; the next is read when the receiver has taken it.

    Args:
        record: What the state is.
        source: Its bytes; closed at the end, whatever the end is.
        offset: First byte to send.
        field: Name of the request's field that holds the offset, for errors.

    Raises:
        InvalidField: the offset lies behind the state.
    """
    try:
        size_bytes = source.manifest.size_bytes
        if offset > size_bytes:
            raise InvalidField(field, f'is {offset}, the state has {size_bytes} bytes')
        yield Header(record.key.adapter.adapter_id, source.manifest, _target_of(record), resume_offset=offset)
        for begin in range(offset, size_bytes, CHUNK_BYTES):
            data = await source.read(begin, CHUNK_BYTES)
            yield StateChunk(begin, data, chunk_checksum(data))
        yield Commit(source.manifest.digest)
    finally:
        await source.close()


def _target_of(record: Record) -> VersionTarget | CheckpointTarget:
    if isinstance(record, Checkpoint):
        return CheckpointTarget(record.key.name, step_count=record.step_count)
    return VersionTarget(record.version, record.is_pinned)
