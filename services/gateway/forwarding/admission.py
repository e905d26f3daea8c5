"""Enforcement of quotas on clients' calls to the model, data and checkpoint services.

Calls over a quota wait or are refused. A creation or a save may repeat an earlier request, which only the model service
recognizes. Such calls are therefore forwarded with the limit, and the service refuses them if they are new. Serialized
requests are searched instead of parsed; for a tenant without quotas the check is a dictionary lookup.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import aclosing
from typing import Any

import grpc

from services.gateway.quotas.enforcement import TrainingLimits
from services.gateway.quotas.requests import is_save, refused_creation, refused_save
from services.kit.rpc.context import current_caller
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2

_ADAPTERS = adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'].full_name
_TRAINING = training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'].full_name
_DATASETS = dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'].full_name
_CHECKPOINTS = checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'].full_name

_grpc: Any = grpc
Context = grpc.aio.ServicerContext[Any, Any]
Handler = Any
"""gRPC's handler of a method; its type stubs do not cover asyncio."""


class AdmittedCalls(grpc.GenericRpcHandler):
    """Passes calls to another handler once quotas admit them.

    Args:
        inner: handler of the calls.
        limits: limits of training.
        patience_seconds: maximum wait of a unary call whose tenant is over its token rate.
    """

    def __init__(self, inner: grpc.GenericRpcHandler, limits: TrainingLimits, *, patience_seconds: float) -> None:
        self._inner = inner
        self._limits = limits
        self._patience_seconds = patience_seconds
        self._wrappers: Mapping[str, Callable[[Handler], Handler]] = {
            f'/{_ADAPTERS}/CreateAdapter': self._around_creation,
            f'/{_TRAINING}/Execute': self._around_operation,
            f'/{_TRAINING}/Train': self._around_stream,
            f'/{_CHECKPOINTS}/UploadCheckpoint': self._around_upload,
            f'/{_DATASETS}/Upload': self._around_upload,
            f'/{_DATASETS}/CreateDataset': self._around_dataset,
            f'/{_DATASETS}/Apply': self._around_dataset,
        }

    def service(self, handler_call_details: grpc.HandlerCallDetails) -> Handler | None:
        """Return the method's handler, or None if the inner handler does not serve the method."""
        handler = self._inner.service(handler_call_details)
        wrap = self._wrappers.get(handler_call_details.method)
        return handler if handler is None or wrap is None else wrap(handler)

    def _around_creation(self, handler: Handler) -> Handler:
        inner = handler.unary_unary
        if inner is None:
            return handler

        async def create(request: bytes, context: Context) -> bytes:
            async with self._limits.creating(current_caller().tenant_id) as limit:
                request = request if limit is None else refused_creation(request, limit)
                return await inner(request, context)

        return _grpc.unary_unary_rpc_method_handler(create)

    def _around_operation(self, handler: Handler) -> Handler:
        inner = handler.unary_unary
        if inner is None:
            return handler

        async def execute(request: bytes, context: Context) -> bytes:
            remaining: Any = context.time_remaining()
            patience = self._patience_seconds if remaining is None else min(remaining, self._patience_seconds)
            return await inner(await self._admit(request, patience), context)

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
            await self._limits.check_storage(current_caller().tenant_id)
            return await inner(requests, context)

        return _grpc.stream_unary_rpc_method_handler(upload)

    def _around_dataset(self, handler: Handler) -> Handler:
        inner = handler.unary_unary
        if inner is None:
            return handler

        async def change(request: bytes, context: Context) -> bytes:
            await self._limits.check_storage(current_caller().tenant_id)
            return await inner(request, context)

        return _grpc.unary_unary_rpc_method_handler(change)

    async def _admitted(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield a stream's operations once they are admitted; back-pressure slows the sender down."""
        async for request in requests:
            yield await self._admit(request, None)

    async def _admit(self, request: bytes, patience_seconds: float | None) -> bytes:
        tenant_id = current_caller().tenant_id
        await self._limits.enter(tenant_id, patience_seconds=patience_seconds)
        if not self._limits.is_storage_limited(tenant_id) or not is_save(request):
            return request
        limit = await self._limits.full_limit(tenant_id)
        return request if limit is None else refused_save(request, limit)
