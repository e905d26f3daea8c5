"""Errors that only training knows."""

from collections.abc import Mapping
from dataclasses import dataclass, field

from services.kit.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
)


@dataclass(eq=False)
class OperationNotFound(NotFound):
    """No operation with that number is on record."""

    reason = 'OPERATION_NOT_FOUND'
    adapter_id: str
    sequence_number: int

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} has no operation {self.sequence_number} on record'


@dataclass(eq=False)
class AdapterIdTaken(AlreadyExists):
    """The id that was asked for was used before; by whom, is not told."""

    reason = 'ID_TAKEN'
    id: str
    kind: str = 'adapter'

    def __str__(self) -> str:
        return f'adapter_id {self.id!r} was used before; choose another, or leave it empty'


@dataclass(eq=False)
class SequenceReused(Aborted):
    """The number was used for an operation with other content."""

    reason = 'SEQUENCE_REUSED'
    adapter_id: str
    sequence_number: int

    def __str__(self) -> str:
        return f'sequence_number {self.sequence_number} of adapter {self.adapter_id!r} was used for another operation'


@dataclass(eq=False)
class SequenceGap(FailedPrecondition):
    """The operation waited for an earlier number that never came."""

    reason = 'SEQUENCE_GAP'
    adapter_id: str
    sequence_number: int
    expected: int

    def __str__(self) -> str:
        return (
            f'operation {self.sequence_number} of adapter {self.adapter_id!r} waited for operation {self.expected}, '
            'which never came'
        )


@dataclass(eq=False)
class AdapterNotReady(FailedPrecondition):
    """The adapter lacks what the verb needs."""

    reason = 'ADAPTER_NOT_READY'
    adapter_id: str
    needs: str

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} needs {self.needs} first'


@dataclass(eq=False)
class LossNotFinite(FailedPrecondition):
    """The forward pass gave no finite loss; no gradient was added."""

    reason = 'LOSS_NOT_FINITE'
    adapter_id: str
    feature_index: int | None = None
    """Which example; None where it is not one alone."""

    def __str__(self) -> str:
        place = 'the batch' if self.feature_index is None else f'example {self.feature_index}'
        return f'the loss of {place} is not finite; the gradient was left as it was'


@dataclass(eq=False)
class BatchTooLarge(InvalidArgument):
    """One batch needs more than the replica has."""

    reason = 'BATCH_TOO_LARGE'
    token_count: int
    token_limit: int

    def __str__(self) -> str:
        return f'the batch has {self.token_count} tokens, this replica takes {self.token_limit} at once; split it'


@dataclass(eq=False)
class LoaderAtEnd(FailedPrecondition):
    """The loader has no batch there."""

    reason = 'LOADER_AT_END'
    loader_id: str
    consumed_rows: int

    def __str__(self) -> str:
        return (
            f'loader {self.loader_id!r} has no batch after {self.consumed_rows} examples: all its epochs are read; '
            'open another one, or one of more epochs'
        )


@dataclass(eq=False)
class UndoTooFar(FailedPrecondition):
    """So many steps back are not kept."""

    reason = 'UNDO_TOO_FAR'
    adapter_id: str
    step_count: int
    step_limit: int

    def __str__(self) -> str:
        return f'adapter {self.adapter_id!r} can go back {self.step_limit} steps, not {self.step_count}'


@dataclass(eq=False)
class ReplicaLeased(FailedPrecondition):
    """The base weights are being trained by another adapter."""

    reason = 'REPLICA_LEASED'

    def __str__(self) -> str:
        return 'the base weights of this replica are leased to a full-parameter run; delete its adapter first'


@dataclass(eq=False)
class JournalUnavailable(Unavailable):
    """The operation could not be made durable, and was not applied."""

    reason = 'JOURNAL_UNAVAILABLE'
    adapter_id: str

    def __str__(self) -> str:
        return f'the operation on adapter {self.adapter_id!r} could not be made durable and was not applied; try again'


@dataclass(eq=False)
class AdapterDamaged(DataLoss):
    """What is kept of the adapter cannot be read any more."""

    reason = 'ADAPTER_DAMAGED'
    adapter_id: str
    problem: str = field(default='', repr=False)
    """For the log alone: it may name files."""

    def __str__(self) -> str:
        return f'what is kept of adapter {self.adapter_id!r} is damaged; load a checkpoint into a new adapter'

    def metadata(self) -> Mapping[str, str]:
        """Return the adapter alone."""
        return {'adapterId': self.adapter_id}


@dataclass(eq=False)
class ExportUnavailable(Unavailable):
    """A merged model could not be written."""

    reason = 'EXPORT_UNAVAILABLE'
    adapter_id: str

    def __str__(self) -> str:
        return f'the merged model of adapter {self.adapter_id!r} could not be written now; try again'
