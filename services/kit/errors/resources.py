"""Errors about resources that several services use: adapters, versions, checkpoints, uploads and bytes."""

from collections.abc import Mapping

from twinkle_services.kit.errors.base import DataLoss, FailedPrecondition, NotFound, Unavailable, domain_error
from twinkle_services.kit.errors.disposition import Disposition


@domain_error('ADAPTER_NOT_FOUND', 'no adapter {adapter_id!r}')
class AdapterNotFound(NotFound):
    """The caller has no such adapter."""

    adapter_id: str


@domain_error('ADAPTER_EXPIRED')
class AdapterExpired(NotFound):
    """The adapter was removed because it was not used for a long time. If it was trained, its state was saved first."""

    adapter_id: str
    checkpoint_path: str
    """Checkpoint with the trained state; empty if the adapter was not trained."""
    setting: str = 'parked_adapter_days'
    """Setting of the model service that limits how long an unused adapter is kept."""

    def __str__(self) -> str:
        remedy = f'load {self.checkpoint_path} into' if self.checkpoint_path else 'it was not trained; create'
        return (
            f'adapter {self.adapter_id!r} was removed because it was not used for as long as {self.setting} of the '
            f'model service allows; {remedy} a new adapter'
        )


@domain_error('VERSION_NOT_FOUND', 'adapter {adapter_id!r} has no version {version}, or no longer has it')
class VersionNotFound(NotFound):
    """The adapter has no such version, or no longer keeps it."""

    adapter_id: str
    version: int


@domain_error('CHECKPOINT_NOT_FOUND', 'no checkpoint {checkpoint_id!r}')
class CheckpointNotFound(NotFound):
    """The caller has no such checkpoint."""

    checkpoint_id: str


@domain_error('BASE_MODEL_NOT_FOUND', 'base model {base_model!r} is not served here; available: {known}')
class BaseModelNotFound(NotFound):
    """The base model is not served here."""

    base_model: str
    known: tuple[str, ...] = ()

    def metadata(self) -> Mapping[str, str]:
        """Return the name, and the available base models separated by commas."""
        return {'baseModel': self.base_model, 'known': ','.join(self.known)}


@domain_error('UPLOAD_NOT_FOUND', 'no upload {upload_id!r}; it may have expired, so upload again')
class UploadNotFound(NotFound):
    """The caller has no such upload, or the upload has expired."""

    upload_id: str


@domain_error('IN_USE', '{kind} {id!r} is in use by {used_by}')
class InUse(FailedPrecondition):
    """Another resource or stream still uses the resource."""

    kind: str
    id: str
    used_by: str


@domain_error(
    'CHUNK_CORRUPT',
    '{field} does not match the data at offset {offset}; send the chunk again, with the checksum that the contract '
    'defines for this field',
    disposition=Disposition.INTERRUPTED,
)
class ChunkCorrupt(DataLoss):
    """A chunk does not match its checksum."""

    offset: int
    field: str = 'chunk.checksum'
    """Field with the checksum."""


@domain_error(
    'DIGEST_MISMATCH',
    'the bytes have digest {actual}, but {field} is {expected}; nothing was stored, so send all bytes again',
    disposition=Disposition.INTERRUPTED,
)
class DigestMismatch(DataLoss):
    """The assembled bytes do not match their digest."""

    expected: str
    actual: str
    field: str = 'digest'
    """Field with the expected digest."""


@domain_error(
    'CHECKPOINT_DAMAGED',
    'the stored files of {checkpoint_id!r} differ from the saved ones and are not served; use another checkpoint',
    disposition=Disposition.REFUSED,
)
class CheckpointDamaged(DataLoss):
    """The stored files of a checkpoint or version are damaged or incomplete."""

    checkpoint_id: str


@domain_error(
    'STORED_DATA_DAMAGED',
    'the stored files of {kind} {id!r} differ from what was written and are not used; create it again',
    disposition=Disposition.REFUSED,
)
class StoredDataDamaged(DataLoss):
    """The stored files of a dataset, a loader or an upload are damaged or incomplete."""

    kind: str
    id: str


@domain_error(
    'STORE_UNAVAILABLE',
    'the store of the service cannot be used: {problem}; nothing was stored, retry later',
    disposition=Disposition.RETRYABLE,
)
class StoreUnavailable(Unavailable):
    """The store refuses to write or to open files at the moment, for example because its disk is full."""

    problem: str


@domain_error('MEMORY_NOT_SHARED', 'the segment is not in shared memory of this host; send the bytes')
class MemoryNotShared(FailedPrecondition):
    """The receiver cannot open the sender's shared-memory segment."""
