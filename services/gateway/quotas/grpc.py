"""Clients of the services that report usage, and functions that mark requests that exceed a quota.

A marked request is still sent, because only the model service recognizes a repeated request, and answers it with the
first response. Requests may be large, so single fields are read without parsing the complete message.
"""

from __future__ import annotations

import grpc

from twinkle.api.data.v1 import dataset_service_pb2, dataset_service_pb2_grpc
from twinkle.api.model.v1 import adapter_service_pb2, operation_pb2, training_service_pb2
from twinkle_services.gateway.quotas.enforcement import TrainingLimits
from twinkle_services.gateway.quotas.rules import Reading
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.serialized_fields import UnreadableMessageError, peek_text

_TIMEOUT_SECONDS = 10.0

_OPERATION = training_service_pb2.ExecuteRequest.OPERATION_FIELD_NUMBER
_SAVE = operation_pb2.Operation.SAVE_FIELD_NUMBER
_NAME = operation_pb2.Save.NAME_FIELD_NUMBER
_REQUEST_ID = adapter_service_pb2.CreateAdapterRequest.REQUEST_ID_FIELD_NUMBER


class GrpcDatasetSizes:
    """Implements `DatasetSizes` over a channel without interceptors. Without a channel, all sizes are 0."""

    def __init__(self, channel: grpc.aio.Channel | None, *, internal_token: str) -> None:
        self._stub = None if channel is None else dataset_service_pb2_grpc.DatasetServiceStub(channel)
        self._internal_token = internal_token

    async def stored_bytes(self, tenant_id: str) -> int:
        if self._stub is None:
            return 0
        with acting_for(Caller(tenant_id=tenant_id)):
            metadata = forwarded_metadata(self._internal_token, is_internal=True)
        request = dataset_service_pb2.GetStoredBytesRequest()
        with call_errors('data'):
            stored = await self._stub.GetStoredBytes(request, timeout=_TIMEOUT_SECONDS, metadata=metadata)
        return stored.dataset_bytes + stored.upload_bytes


def reading_of(message: adapter_service_pb2.WatchAdaptersResponse) -> Reading:
    """Return the reading of a run's meter in a response that contains an adapter."""
    return Reading(
        run_id=message.adapter.adapter_id,
        tenant_id=message.tenant_id,
        trained_token_count=message.adapter.trained_token_count,
        operation_count=message.adapter.sequence_number,
    )


async def admitted_operation(
    limits: TrainingLimits, tenant_id: str, request: bytes, *, patience_seconds: float | None
) -> bytes:
    """Wait until a tenant may run an operation, and return its ExecuteRequest or TrainRequest.

    If the storage of the tenant is full, a save of a named checkpoint is marked with the storage limit in bytes, and is
    then refused unless it repeats an earlier request.

    Raises:
        QuotaExceeded: the wait would exceed `patience_seconds`.
        InvalidField: the bytes are not a valid message.
    """
    await limits.rates.enter(tenant_id, patience_seconds=patience_seconds)
    if not limits.is_storage_limited(tenant_id) or not _is_save(request):
        return request
    if (limit := await limits.full_limit(tenant_id)) is None:
        return request
    # The mark is appended, because concatenated protobuf messages are merged.
    save = operation_pb2.Save(stored_bytes_limit=limit)
    mark = training_service_pb2.ExecuteRequest(operation=operation_pb2.Operation(save=save))
    return request + mark.SerializeToString()


def _is_save(request: bytes) -> bool:
    try:
        return bool(peek_text(request, _OPERATION, _SAVE, _NAME))
    except UnreadableMessageError as error:
        raise InvalidField('operation', f'cannot be read: {error}') from error


def refused_creation(request: bytes, limit: int) -> bytes:
    """Append the adapter limit to a CreateAdapterRequest, which is then refused unless it repeats an earlier one.

    Raises:
        InvalidField: the bytes are not a valid message, so an appended field could become part of a truncated one.
    """
    try:
        peek_text(request, _REQUEST_ID)
    except UnreadableMessageError as error:
        raise InvalidField('request_id', f'cannot be read: {error}') from error
    return request + adapter_service_pb2.CreateAdapterRequest(adapters_limit=limit).SerializeToString()
