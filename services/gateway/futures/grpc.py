"""Client of the model services for futures."""

from __future__ import annotations

from typing import Any, cast

import grpc

from twinkle.api.model.v1 import adapter_service_pb2 as adapters
from twinkle.api.model.v1 import operation_pb2
from twinkle.api.model.v1 import training_service_pb2 as training
from twinkle_services.gateway.fleet.upstreams import ModelChannels
from twinkle_services.gateway.quotas.enforcement import TrainingLimits
from twinkle_services.gateway.quotas.grpc import admitted_operation
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import call_errors, forwarded_metadata
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.rpc.serialized_fields import peek_text

_ADAPTERS = adapters.DESCRIPTOR.services_by_name['AdapterService'].full_name
_TRAINING = training.DESCRIPTOR.services_by_name['TrainingService'].full_name
_DELETED = adapters.DeleteAdapterRequest.ADAPTER_ID_FIELD_NUMBER
_TRAINED = training.ExecuteRequest.OPERATION_FIELD_NUMBER, operation_pb2.Operation.ADAPTER_ID_FIELD_NUMBER
"""Field numbers of the adapter's id in the requests."""
_CALL_SECONDS = 30.0
"""Timeout of calls that do not queue."""
_QUEUED_CALL_SECONDS = 3600.0
"""Timeout of calls that queue behind other operations. A call that takes longer is repeated, and its operation
continues."""


class GrpcTrainer:
    """Implements `ports.Trainer` within quotas.

    Operations wait for the tenant's token rate. The model service refuses creations above the limit of adapters, and
    saves above the limit of storage (QUOTA_EXCEEDED), unless they repeat an earlier request.
    """

    def __init__(self, models: ModelChannels, limits: TrainingLimits, *, internal_token: str) -> None:
        self._models = models
        self._limits = limits
        self._internal_token = internal_token

    async def create_adapter(self, tenant_id: str, request: bytes, *, request_id: str) -> bytes:
        message = adapters.CreateAdapterRequest.FromString(request)
        message.request_id = message.request_id or request_id
        async with self._limits.creating(tenant_id) as limit:
            if limit is not None:
                message.adapters_limit = limit
            raw = message.SerializeToString(deterministic=True)
            channel = await self._models.of_new_adapter(
                tenant_id, message.base_model, message.adapter_id, request_id=message.request_id
            )
            method = f'{_ADAPTERS}/CreateAdapter'
            return await self._call(channel, method, raw, tenant_id=tenant_id, seconds=_QUEUED_CALL_SECONDS)

    async def delete_adapter(self, tenant_id: str, request: bytes) -> bytes:
        channel = await self._models.of_adapter(tenant_id, peek_text(request, _DELETED))
        method = f'{_ADAPTERS}/DeleteAdapter'
        return await self._call(channel, method, request, tenant_id=tenant_id, seconds=_QUEUED_CALL_SECONDS)

    async def last_number(self, tenant_id: str, adapter_id: str) -> int:
        channel = await self._models.of_adapter(tenant_id, adapter_id)
        request = adapters.GetAdapterRequest(adapter_id=adapter_id).SerializeToString()
        raw = await self._call(channel, f'{_ADAPTERS}/GetAdapter', request, tenant_id=tenant_id)
        return adapters.GetAdapterResponse.FromString(raw).adapter.sequence_number

    async def execute(self, tenant_id: str, request: bytes, *, number: int) -> bytes:
        request = await admitted_operation(self._limits, tenant_id, request, patience_seconds=None)
        channel = await self._models.of_adapter(tenant_id, peek_text(request, *_TRAINED))
        # The concatenation of two serialized messages is their merge, so a large batch is not parsed here.
        addition = training.ExecuteRequest(
            operation=operation_pb2.Operation(sequence_number=number), is_waiting_allowed=True
        )
        raw = request + addition.SerializeToString(deterministic=True)
        return await self._call(channel, f'{_TRAINING}/Execute', raw, tenant_id=tenant_id, seconds=_QUEUED_CALL_SECONDS)

    async def cancel(self, tenant_id: str, adapter_id: str, *, number: int) -> None:
        channel = await self._models.of_adapter(tenant_id, adapter_id)
        request = training.CancelOperationRequest(adapter_id=adapter_id, sequence_number=number).SerializeToString()
        await self._call(channel, f'{_TRAINING}/CancelOperation', request, tenant_id=tenant_id)

    async def _call(
        self, channel: grpc.aio.Channel, method: str, request: bytes, *, tenant_id: str, seconds: float = _CALL_SECONDS
    ) -> bytes:
        # The scope of the key was checked when the request was accepted.
        with acting_for(Caller(tenant_id=tenant_id, scopes=frozenset({'train'}))):
            # Only an internal call may choose the id of an adapter.
            metadata = forwarded_metadata(self._internal_token, is_internal=True)
        with call_errors('model'):
            return await cast(Any, channel).unary_unary(f'/{method}')(request, timeout=seconds, metadata=metadata)
