"""Errors about the things more than one service knows: adapters, versions, checkpoints, bytes."""

from collections.abc import Mapping
from dataclasses import dataclass

from services.kit.errors.base import (
    DataLoss,
    FailedPrecondition,
    NotFound,
)


@dataclass(eq=False)
class AdapterNotFound(NotFound):
    """No such adapter for this caller."""

    reason = 'ADAPTER_NOT_FOUND'
    adapter_id: str

    def __str__(self) -> str:
        return f'no adapter {self.adapter_id!r}'


@dataclass(eq=False)
class VersionNotFound(NotFound):
    """No such version of the adapter, or it has left the ring."""

    reason = 'VERSION_NOT_FOUND'
    adapter_id: str
    version: int

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} has no version {self.version}'


@dataclass(eq=False)
class CheckpointNotFound(NotFound):
    """No such checkpoint for this caller."""

    reason = 'CHECKPOINT_NOT_FOUND'
    checkpoint_id: str

    def __str__(self) -> str:
        return f'no checkpoint {self.checkpoint_id!r}'


@dataclass(eq=False)
class BaseModelNotFound(NotFound):
    """The base model is not served here."""

    reason = 'BASE_MODEL_NOT_FOUND'
    base_model: str
    known: tuple[str, ...] = ()

    def __str__(self) -> str:
        return f'base model {self.base_model!r} is not served here; there are {", ".join(self.known) or "none"}'

    def metadata(self) -> Mapping[str, str]:
        """Return the name and what is served."""
        return {'baseModel': self.base_model, 'known': ','.join(self.known)}


@dataclass(eq=False)
class UploadNotFound(NotFound):
    """No such upload for this caller, or it has expired."""

    reason = 'UPLOAD_NOT_FOUND'
    upload_id: str

    def __str__(self) -> str:
        return f'no upload {self.upload_id!r}'


@dataclass(eq=False)
class InUse(FailedPrecondition):
    """Still in use by something else."""

    reason = 'IN_USE'
    kind: str
    id: str
    used_by: str

    def __str__(self) -> str:
        return f'{self.kind} {self.id!r} is in use by {self.used_by}'


@dataclass(eq=False)
class ChunkCorrupt(DataLoss):
    """A chunk does not match its checksum."""

    reason = 'CHUNK_CORRUPT'
    offset: int

    def __str__(self) -> str:
        return f'the chunk at offset {self.offset} does not match its checksum; send it again'


@dataclass(eq=False)
class DigestMismatch(DataLoss):
    """The assembled bytes do not match their digest."""

    reason = 'DIGEST_MISMATCH'
    expected: str
    actual: str

    def __str__(self) -> str:
        return f'the bytes have digest {self.actual}, expected {self.expected}; nothing was kept'


@dataclass(eq=False)
class MemoryNotShared(FailedPrecondition):
    """The receiver cannot open the sender's shared-memory segment."""

    reason = 'MEMORY_NOT_SHARED'

    def __str__(self) -> str:
        return 'the segment is not in shared memory of this host; send the bytes'
