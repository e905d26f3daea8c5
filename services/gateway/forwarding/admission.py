"""Clients' calls to the model and checkpoint service within quotas.

What may not be done now waits, or is refused here; what only the model service can tell from a repeat, a creation or a
save, is passed on with the limit that has it refused there. Serialized requests are looked into and not parsed; a
tenant without quotas costs a look into a table.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.quotas.new_adapters import NewAdapters
from services.gateway.quotas.requests import QuotaRequests
from services.gateway.quotas.training import TrainingGate
from services.kit.rpc.context import current_caller
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2

_ADAPTERS = adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'].full_name
_TRAINING = training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'].full_name
_CHECKPOINTS = checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'].full_name

_grpc: Any = grpc
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""grpc's handler of a method; its types know nothing of asyncio."""


@dataclass(frozen=True, kw_only=True)
class Quotas:
    """What calls are held to."""

    new_adapters: NewAdapters
    gate: TrainingGate
    requests: QuotaRequests
    """Reads and marks what is passed on."""
    patience_seconds: float
    """How long a call waits until its tenant owes no tokens."""


class AdmittedCalls(grpc.GenericRpcHandler):
    """Hands calls to another handler, those that quotas are about when they may be made."""

    def __init__(self, inner: grpc.GenericRpcHandler, quotas: Quotas) -> None:
        """Stand before `inner`."""
        self._inner = inner
        self._quotas = quotas
        self._wrappers: Mapping[str, Callable[[Handler], Handler]] = {
            f'/{_ADAPTERS}/CreateAdapter': self._around_creation,
            f'/{_TRAINING}/Execute': self._around_operation,
            f'/{_TRAINING}/Train': self._around_stream,
            f'/{_CHECKPOINTS}/UploadCheckpoint': self._around_upload,
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the method's handler; None where the inner one has none."""
        handler = self._inner.service(handler_call_details)
        wrap = self._wrappers.get(handler_call_details.method)
        return handler if handler is None or wrap is None else wrap(handler)

    def _around_creation(self, handler: Handler) -> Handler:
        inner = handler.unary_unary
        if inner is None:
            return handler

        async def create(request: bytes, context: Context) -> bytes:
            quotas = self._quotas
            async with quotas.new_adapters.creating(current_caller().tenant_id) as limit:
                request = request if limit is None else quotas.requests.refused_creation(request, limit)
                return await inner(request, context)

        return _grpc.unary_unary_rpc_method_handler(create)

    def _around_operation(self, handler: Handler) -> Handler:
        inner = handler.unary_unary
        if inner is None:
            return handler

        async def execute(request: bytes, context: Context) -> bytes:
            left: Any = context.time_remaining()
            patience = self._quotas.patience_seconds
            return await inner(await self._admit(request, patience if left is None else min(left, patience)), context)

        return _grpc.unary_unary_rpc_method_handler(execute)

    def _around_stream(self, handler: Handler) -> Handler:
        inner = handler.stream_stream
        if inner is None:
            return handler

        async def train(requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
            async with aclosing(inner(self._admitted(requests), context)) as responses:
                async for response in responses:
                    yield response

        return _grpc.stream_stream_rpc_method_handler(train)

    def _around_upload(self, handler: Handler) -> Handler:
        inner = handler.stream_unary
        if inner is None:
            return handler

        async def upload(requests: AsyncIterator[bytes], context: Context) -> bytes:
            await self._quotas.gate.check_storage(current_caller().tenant_id)
            return await inner(requests, context)

        return _grpc.stream_unary_rpc_method_handler(upload)

    async def _admitted(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield a stream's operations as they may be carried out: its sender is slowed down and not refused."""
        async for request in requests:
            yield await self._admit(request, None)

    async def _admit(self, request: bytes, patience_seconds: float | None) -> bytes:
        tenant_id, quotas = current_caller().tenant_id, self._quotas
        await quotas.gate.enter(tenant_id, patience_seconds=patience_seconds)
        if not quotas.gate.is_storage_limited(tenant_id) or not quotas.requests.is_save(request):
            return request
        limit = await quotas.gate.full_limit(tenant_id)
        return request if limit is None else quotas.requests.refused_save(request, limit)
