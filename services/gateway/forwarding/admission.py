"""Enforcement of quotas on clients' calls to the model, data and checkpoint services.

Calls over a quota wait or are refused. Only the model service recognizes a call that repeats an earlier one. A call
that creates an adapter or saves a checkpoint is therefore forwarded with the limit, and the service refuses the call if
it is new. Single fields are read from the serialized requests, which are not parsed completely.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import aclosing
from functools import partial
from typing import Any

import grpc

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2
from twinkle_services.gateway.quotas.enforcement import TrainingLimits
from twinkle_services.gateway.quotas.grpc import admitted_operation, refused_creation
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller

_ADAPTERS = adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'].full_name
_TRAINING = training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'].full_name
_DATASETS = dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'].full_name
_CHECKPOINTS = checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'].full_name

_TRAIN = f'/{_TRAINING}/Train'
_UPLOADS = (f'/{_CHECKPOINTS}/UploadCheckpoint', f'/{_DATASETS}/Upload')

_grpc: Any = grpc
Handler = Any
"""Handler of a method. The type stubs of gRPC do not cover its asyncio handlers."""
UnaryCall = Callable[[bytes, Context], Awaitable[bytes]]


class AdmittedCalls:
    """Passes calls to their handlers once quotas admit them."""

    def __init__(self, limits: TrainingLimits, *, patience_seconds: float) -> None:
        """Apply `limits`; `patience_seconds` limits how long a unary call waits for its tenant's token rate."""
        self._limits = limits
        self._patience_seconds = patience_seconds
        self._unary: Mapping[str, Callable[..., Awaitable[bytes]]] = {
            f'/{_ADAPTERS}/CreateAdapter': self._create,
            f'/{_TRAINING}/Execute': self._execute,
            f'/{_DATASETS}/CreateDataset': self._store,
            f'/{_DATASETS}/Apply': self._store,
        }

    def admitted(self, method: str, handler: Handler) -> Handler:
        """Return `handler` within the quotas of `method`, its full name with a leading slash.

        Handlers of methods without quotas are returned unchanged.
        """
        if handler.unary_unary is not None and method in self._unary:
            return _grpc.unary_unary_rpc_method_handler(partial(self._unary[method], handler.unary_unary))
        if handler.stream_unary is not None and method in _UPLOADS:
            return _grpc.stream_unary_rpc_method_handler(partial(self._store, handler.stream_unary))
        if handler.stream_stream is not None and method == _TRAIN:
            return _grpc.stream_stream_rpc_method_handler(partial(self._train, handler.stream_stream))
        return handler

    async def _create(self, inner: UnaryCall, request: bytes, context: Context) -> bytes:
        async with self._limits.creating(current_caller().tenant_id) as limit:
            return await inner(request if limit is None else refused_creation(request, limit), context)

    async def _execute(self, inner: UnaryCall, request: bytes, context: Context) -> bytes:
        remaining: Any = context.time_remaining()
        patience = self._patience_seconds if remaining is None else min(remaining, self._patience_seconds)
        tenant_id = current_caller().tenant_id
        request = await admitted_operation(self._limits, tenant_id, request, patience_seconds=patience)
        return await inner(request, context)

    async def _store(self, inner: Callable[..., Awaitable[bytes]], request: Any, context: Context) -> bytes:
        """Call a method that stores data; `request` is one request or a stream of requests."""
        await self._limits.check_storage(current_caller().tenant_id)
        return await inner(request, context)

    async def _train(self, inner: Any, requests: AsyncIterator[bytes], context: Context) -> AsyncIterator[bytes]:
        async with aclosing(inner(self._admitted(requests), context)) as responses:
            async for response in responses:
                yield response

    async def _admitted(self, requests: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
        """Yield each operation of a stream once it is admitted; until then, back-pressure slows the client down."""
        tenant_id = current_caller().tenant_id
        async for request in requests:
            yield await admitted_operation(self._limits, tenant_id, request, patience_seconds=None)
