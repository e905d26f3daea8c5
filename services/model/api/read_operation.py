"""Operations as they come off the wire, whole: a batch that was uploaded is put where the message names it.

What is journaled and fingerprinted is the operation with its examples inside, so that replay needs no
upload, and the same examples are the same operation however they came.
"""

import asyncio
from typing import Any

from google.protobuf.message import DecodeError

from services.kit.caller import Caller
from services.kit.errors import InvalidField
from services.kit.rpc.fields import id_from_proto
from services.model.api.convert_operation import operation_from_proto
from services.model.application.upload_batch import ReadUpload
from services.model.domain.operation import Operation
from twinkle.api.data.v1 import input_feature_pb2
from twinkle.api.model.v1 import operation_pb2

_THREAD_BYTES = 1 << 20
"""Larger messages are converted beside the event loop, which they would hold up for milliseconds."""


class OperationReader:
    """Turns messages into operations."""

    def __init__(self, read_upload: ReadUpload, *, vocabulary_size: int) -> None:
        """Take uploads from `read_upload`; token ids must be below `vocabulary_size`."""
        self._read_upload = read_upload
        self._vocabulary_size = vocabulary_size

    async def __call__(self, caller: Caller, message: operation_pb2.Operation, field: str) -> Operation:
        """Return the operation.

        Raises:
            InvalidField: something is missing, malformed or out of range.
            UploadNotFound: the batch was not uploaded by the caller's tenant, or not wholly, or expired.
            NotBuiltYet: the verb or where its batch is, is in the contract only.
        """
        verb = message.WhichOneof('verb')
        batch = getattr(getattr(message, verb), 'batch', None) if verb else None
        content = b''
        if batch is not None and batch.WhichOneof('source') == 'upload_id':
            upload_id = id_from_proto(batch.upload_id, f'{field}.{verb}.batch.upload_id')
            content = await self._read_upload(caller, upload_id)
        if batch is not None and batch.loader.HasField('loaded'):
            raise InvalidField(f'{field}.{verb}.batch.loader.loaded', 'must be unset: the model service fetches it')
        if len(content) + message.ByteSize() < _THREAD_BYTES:
            return self._convert(message, field, content)
        return await asyncio.to_thread(self._convert, message, field, content)

    def _convert(self, message: operation_pb2.Operation, field: str, content: bytes) -> Operation:
        if content:
            verb = message.WhichOneof('verb')
            _fill(getattr(message, verb or '').batch, content, f'{field}.{verb}.batch.upload_id')
        return operation_from_proto(message, field, vocabulary_size=self._vocabulary_size)


def _fill(batch: Any, content: bytes, field: str) -> None:
    try:
        batch.features.CopyFrom(input_feature_pb2.FeatureBatch.FromString(content))
    except DecodeError as error:
        raise InvalidField(field, 'holds no FeatureBatch') from error
