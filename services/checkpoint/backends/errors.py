"""Converts errors of the library to domain errors, and creates the errors for missing states."""

from collections.abc import Iterator
from contextlib import contextmanager

from twinkle import checkpoint_engine as engine
from twinkle_services.checkpoint.domain import CheckpointKey, VersionKey
from twinkle_services.kit.errors import (
    CheckpointNotFound,
    ChunkCorrupt,
    DigestMismatch,
    InvalidField,
    NotFound,
    StreamOutOfOrder,
    VersionNotFound,
)


@contextmanager
def domain_errors() -> Iterator[None]:
    """Convert the library's errors about chunks and digests to domain errors."""
    try:
        yield
    except engine.ChunkCorrupt as error:
        raise ChunkCorrupt(error.offset, field='frame.chunk.checksum') from error
    except engine.ChunkOutOfOrder as error:
        raise StreamOutOfOrder.at_byte(error.expected) from error
    except engine.ChunkOutOfRange as error:
        problem = f'ends at byte {error.end}, but the state has {error.size_bytes} bytes'
        raise InvalidField('frame.chunk', problem) from error
    except engine.StateIncomplete as error:
        raise StreamOutOfOrder.at_byte(error.next_offset) from error
    except engine.DigestMismatch as error:
        raise DigestMismatch(error.expected, error.actual, field='frame.header.manifest.digest') from error


def not_found(key: VersionKey | CheckpointKey) -> NotFound:
    """Return the error for a version or checkpoint that does not exist."""
    if isinstance(key, VersionKey):
        return VersionNotFound(key.adapter.adapter_id, key.version)
    return CheckpointNotFound(key.checkpoint_id)
