"""Converts received operations and inserts uploaded batches; `convert_verb` converts the verbs.

The journal stores the operation with its examples, and the fingerprint covers them. A replay therefore needs no upload,
and the fingerprint is the same for examples in the message and in an upload.
"""

import asyncio
from datetime import timedelta
from typing import Any

from google.protobuf.message import DecodeError

from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import operation_pb2 as wire
from twinkle.api.model.v1 import training_service_pb2
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import duration_from_proto, fingerprint_of, id_from_proto
from twinkle_services.kit.rpc.message_bounds import THREAD_BYTES, check_options
from twinkle_services.kit.rpc.message_elements import check_elements
from twinkle_services.model.api.convert_features import (
    batch_reference_from_proto,
    check_example_count,
    cursor_from_proto,
)
from twinkle_services.model.api.convert_verb import verb_from_proto
from twinkle_services.model.application.upload_batch import ReadUpload
from twinkle_services.model.domain import operation as domain

_DEFAULT_WAIT = timedelta(seconds=20)
_MAX_WAIT = timedelta(hours=1)
_OPTION_FIELDS = ('training_config', 'optimizer_options', 'loss')
"""Fields of verbs that contain options."""


class OperationReader:
    """Converts operations and reads their uploads."""

    def __init__(self, read_upload: ReadUpload, *, vocabulary_size: int, max_batch_examples: int | None = None) -> None:
        """Create the reader.

        Args:
            read_upload: Reads uploaded batches.
            vocabulary_size: Upper bound of token ids, exclusive.
            max_batch_examples: Maximum number of examples of a batch; None for no limit.
        """
        self._read_upload = read_upload
        self._vocabulary_size = vocabulary_size
        self._max_batch_examples = max_batch_examples

    async def __call__(self, caller: Caller, message: wire.Operation, field: str) -> domain.Operation:
        """Convert an operation; the message may be modified.

        Raises:
            InvalidField: A field is missing, malformed or out of range.
            ScopeMissing, UploadNotFound, StoredDataDamaged, StoreUnavailable: The upload cannot be read; see
                `ReadUpload`.
            NotBuiltYet: The verb or the source of the batch is not supported yet.
        """
        verb = message.WhichOneof('verb')
        batch = getattr(getattr(message, verb), 'batch', None) if verb else None
        content = b''
        if batch is not None and batch.WhichOneof('source') == 'upload_id':
            upload_id = id_from_proto(batch.upload_id, f'{field}.{verb}.batch.upload_id')
            content = await self._read_upload(caller, upload_id)
        if batch is not None and batch.loader.HasField('loaded'):
            raise InvalidField(f'{field}.{verb}.batch.loader.loaded', 'must be unset: the model service sets it')
        if len(content) + message.ByteSize() < THREAD_BYTES:
            return self._convert(message, field, content)
        return await asyncio.to_thread(self._convert, message, field, content)

    def _convert(self, message: wire.Operation, field: str, content: bytes) -> domain.Operation:
        verb = message.WhichOneof('verb')
        source = 'features.features'
        if content:
            source = 'upload_id'
            _insert_features(getattr(message, verb or '').batch, content, f'{field}.{verb}.batch.upload_id')
        if verb is not None:
            self._check_size(getattr(message, verb), f'{field}.{verb}', source)
        return operation_from_proto(message, field, vocabulary_size=self._vocabulary_size)

    def _check_size(self, verb: Any, field: str, source: str) -> None:
        """Refuse too many examples, and options that are too large, before they are converted."""
        present = {descriptor.name: value for descriptor, value in verb.ListFields()}
        for name in _OPTION_FIELDS:
            if name in present:
                check_options(present[name], f'{field}.{name}')
        if self._max_batch_examples is not None:
            limit = self._max_batch_examples
            check_example_count(present.get('logprob_gradients', ()), f'{field}.logprob_gradients', limit=limit)
            if 'batch' in present:
                check_example_count(present['batch'].features.features, f'{field}.batch.{source}', limit=limit)


def _insert_features(batch: Any, content: bytes, field: str) -> None:
    check_elements(content, input_feature_pb2.FeatureBatch.DESCRIPTOR, field)
    try:
        batch.features.CopyFrom(input_feature_pb2.FeatureBatch.FromString(content))
    except DecodeError as error:
        raise InvalidField(field, 'must refer to a serialized FeatureBatch') from error


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
