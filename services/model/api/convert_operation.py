"""Converts operations; `convert_verb` converts their verbs."""

from datetime import timedelta

from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_service_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import duration_from_proto, fingerprint_of, id_from_proto
from twinkle_services.model.api.convert_features import batch_reference_from_proto, cursor_from_proto
from twinkle_services.model.api.convert_verb import verb_from_proto
from twinkle_services.model.domain import operation as domain

_DEFAULT_WAIT = timedelta(seconds=20)
_MAX_WAIT = timedelta(hours=1)


def operation_from_proto(message: wire.Operation, field: str, *, vocabulary_size: int) -> domain.Operation:
    """Convert an operation.

    Args:
        message: The message; its field `save.stored_bytes_limit` is cleared.
        field: Field path of the message, for errors.
        vocabulary_size: Upper bound of token ids, exclusive.

    Raises:
        InvalidField: A field is missing, malformed or out of range.
        NotBuiltYet: The verb or the source of the batch is not supported yet.
    """
    if message.sequence_number < 1:
        raise InvalidField(f'{field}.sequence_number', f'must be at least 1, got {message.sequence_number}')
    verb = verb_from_proto(message, field, vocabulary_size=vocabulary_size)
    if message.save.HasField('stored_bytes_limit'):
        # The gateway sets the limit only while the quota is used up, so it is not part of the operation's fingerprint.
        message.save.ClearField('stored_bytes_limit')
    payload = message.SerializeToString(deterministic=True)
    name = message.WhichOneof('verb') or ''
    batch = getattr(getattr(message, name), 'batch', wire.Batch())
    is_loaded = batch.loader.HasField('loaded')
    return domain.Operation(
        adapter_id=id_from_proto(message.adapter_id, f'{field}.adapter_id'),
        sequence_number=message.sequence_number,
        verb=verb,
        fingerprint=_fingerprint_without_batch(message) if is_loaded else fingerprint_of(payload),
        payload=payload,
        batch_reference=batch_reference_from_proto(batch, f'{field}.{name}.batch'),
        next_cursor=cursor_from_proto(batch.loader.loaded.next_cursor) if is_loaded else None,
    )


def _fingerprint_without_batch(message: wire.Operation) -> str:
    """Return the fingerprint of the operation as sent, without the batch that was fetched from its loader."""
    original = wire.Operation()
    original.CopyFrom(message)
    getattr(original, original.WhichOneof('verb') or '').batch.loader.ClearField('loaded')
    return fingerprint_of(original)


def max_wait_from_proto(request: training_service_pb2.WaitOperationRequest) -> timedelta:
    """Return the maximum time to wait for an operation; 20 seconds if the request has no timeout.

    Raises:
        InvalidField: The timeout is negative or too long.
    """
    if not request.HasField('timeout'):
        return _DEFAULT_WAIT
    return duration_from_proto(request.timeout, 'timeout', minimum=timedelta(), maximum=_MAX_WAIT)
