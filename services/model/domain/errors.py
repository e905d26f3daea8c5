"""Errors that only the model service raises. Shared errors are in `twinkle_services.kit.errors`."""

from collections.abc import Mapping
from dataclasses import field

from twinkle_services.kit.errors import (
    Aborted,
    AlreadyExists,
    DataLoss,
    Disposition,
    FailedPrecondition,
    InvalidArgument,
    NotFound,
    Unavailable,
    domain_error,
)


@domain_error(
    'OPERATION_NOT_FOUND',
    'adapter {adapter_id!r} has no operation {sequence_number} on record; the operation was never accepted, or its '
    'record was deleted',
)
class OperationNotFound(NotFound):
    """No operation with that number is on record."""

    adapter_id: str
    sequence_number: int


@domain_error('ID_TAKEN', 'adapter_id {id!r} was used before; choose another, or leave it empty')
class AdapterIdTaken(AlreadyExists):
    """The requested id was used before; the error does not reveal the tenant that used it."""

    id: str
    kind: str = 'adapter'


@domain_error(
    'SEQUENCE_REUSED',
    'sequence_number {sequence_number} of adapter {adapter_id!r} was used for another operation; use the next number',
)
class SequenceReused(Aborted):
    """The number was used for an operation with different content."""

    adapter_id: str
    sequence_number: int


@domain_error(
    'SEQUENCE_GAP',
    'operation {sequence_number} of adapter {adapter_id!r} waited for operation {expected}, which was not received; '
    'send operation {expected} first',
    disposition=Disposition.UNKNOWN,
)
class SequenceGap(FailedPrecondition):
    """The operation waited for an earlier number that was not received."""

    adapter_id: str
    sequence_number: int
    expected: int


@domain_error('TAKEOVER_REFUSED', 'the runs of trainer {trainer!r} cannot be taken over: {problem}')
class TakeoverRefused(FailedPrecondition):
    """The runs of a trainer cannot be taken over; none of them was moved."""

    trainer: str
    problem: str


@domain_error('ADAPTER_NOT_READY', 'adapter {adapter_id!r} needs {needs} first')
class AdapterNotReady(FailedPrecondition):
    """The adapter is not in the state that the verb requires."""

    adapter_id: str
    needs: str


@domain_error('LOSS_NOT_FINITE')
class LossNotFinite(FailedPrecondition):
    """A loss, a gradient or the accumulated gradient is not finite; no gradient was added."""

    adapter_id: str
    feature_index: int | None = None
    """Position of the example in the batch; None if no single example is the cause."""

    def __str__(self) -> str:
        source = 'the batch' if self.feature_index is None else f'example {self.feature_index}'
        problem = f'the loss or the gradient of {source} is not finite, so no gradient was added'
        return f'{problem}; check the data and the learning rate'


@domain_error(
    'OPERATION_CRASHED',
    'operation {sequence_number} of adapter {adapter_id!r} was not applied, because the model service crashed each '
    'time it did this work; continue with the next number, for example with a smaller batch',
)
class OperationCrashed(FailedPrecondition):
    """The process ended during each attempt to run the operation, which is not attempted again."""

    adapter_id: str
    sequence_number: int


@domain_error(
    'REQUEST_CRASHED',
    'the model service crashed each time it created this adapter; try a lower rank, fewer target modules or another '
    'checkpoint',
)
class CreationCrashed(FailedPrecondition):
    """The process ended during each attempt to create the adapter."""


@domain_error(
    'BATCH_TOO_LARGE',
    'the batch has {token_count} tokens, but this replica processes at most {token_limit} at once; split it',
)
class BatchTooLarge(InvalidArgument):
    """The batch has more tokens than the replica accepts, or memory ran out."""

    token_count: int
    token_limit: int


@domain_error(
    'LOADER_AT_END',
    'loader {loader_id!r} has no batch after {consumed_rows} examples because all its epochs were read; '
    'open another loader, or one with more epochs',
)
class LoaderAtEnd(FailedPrecondition):
    """The loader has no batch after the requested position."""

    loader_id: str
    consumed_rows: int


@domain_error(
    'UNDO_TOO_FAR',
    'adapter {adapter_id!r} can undo {step_limit} steps, not {step_count}; load a checkpoint of an earlier step',
)
class UndoTooFar(FailedPrecondition):
    """The adapter cannot undo as many steps as requested."""

    adapter_id: str
    step_count: int
    step_limit: int


@domain_error(
    'REPLICA_LEASED',
    'the base weights of this replica are leased to a full-parameter run; retry when its lease has ended',
    disposition=Disposition.REFUSED,
)
class ReplicaLeased(FailedPrecondition):
    """Another adapter trains the base weights."""


@domain_error(
    'REPLICA_IN_USE',
    'a full-parameter run needs the whole replica, but {problem}',
    disposition=Disposition.REFUSED,
)
class ReplicaInUse(FailedPrecondition):
    """The replica cannot be leased now."""

    problem: str

    def metadata(self) -> Mapping[str, str]:
        """Return no metadata, because the problem is a sentence."""
        return {}


@domain_error(
    'FULL_PARAMETERS_DISABLED',
    'this server does not train the base model itself; train an adapter instead, or ask an operator to set '
    'full_parameters of the model service',
    disposition=Disposition.REFUSED,
)
class FullParametersDisabled(FailedPrecondition):
    """The operator does not allow full-parameter runs."""


@domain_error(
    'JOURNAL_UNAVAILABLE',
    'the operation on adapter {adapter_id!r} could not be made durable and was not applied; retry',
    disposition=Disposition.RETRYABLE,
)
class JournalUnavailable(Unavailable):
    """The operation could not be made durable, and was not applied."""

    adapter_id: str


@domain_error(
    'ADAPTER_DAMAGED',
    'the stored state of adapter {adapter_id!r} is damaged; load a checkpoint into a new adapter',
)
class AdapterDamaged(DataLoss):
    """The stored state of the adapter can no longer be read."""

    adapter_id: str
    problem: str = field(default='', repr=False)
    """Details for the log only, because they may contain file names."""

    def metadata(self) -> Mapping[str, str]:
        """Return the adapter id, but not the problem."""
        return {'adapterId': self.adapter_id}


@domain_error(
    'EXPORT_UNAVAILABLE',
    'the merged model of adapter {adapter_id!r} could not be written at the moment; retry later',
    disposition=Disposition.RETRYABLE,
)
class ExportUnavailable(Unavailable):
    """A merged model could not be written."""

    adapter_id: str
