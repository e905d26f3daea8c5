"""Enforcement of quotas on clients' calls to the model, data and checkpoint services.

Calls over a quota wait or are refused. Only the model service recognizes a call that repeats an earlier one. A call
that creates an adapter or saves a checkpoint is therefore forwarded with the limit, and the service refuses the call if
it is new. Single fields are read from the serialized requests, which are not parsed completely.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.data.v1 import dataset_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, training_service_pb2
from twinkle_services.gateway.forwarding.bytes import Admit, Request
from twinkle_services.gateway.quotas.enforcement import TrainingLimits
from twinkle_services.gateway.quotas.grpc import admitted_operation, refused_creation
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller

_ADAPTERS = adapter_service_pb2.DESCRIPTOR.services_by_name['AdapterService'].full_name
_TRAINING = training_service_pb2.DESCRIPTOR.services_by_name['TrainingService'].full_name
_DATASETS = dataset_service_pb2.DESCRIPTOR.services_by_name['DatasetService'].full_name
_CHECKPOINTS = checkpoint_service_pb2.DESCRIPTOR.services_by_name['CheckpointService'].full_name


class QuotaAdmission:
    """Admits calls within the limits of their tenants.

    `patience_seconds` limits how long a unary call waits for its tenant's token rate.
    """

    def __init__(self, limits: TrainingLimits, *, patience_seconds: float) -> None:
        self._limits = limits
        self._patience_seconds = patience_seconds
        self.by_method: Mapping[str, Admit] = {
            f'{_ADAPTERS}.CreateAdapter': self._creation,
            f'{_TRAINING}.Execute': self._operation,
            f'{_TRAINING}.Train': self._operations,
            f'{_DATASETS}.CreateDataset': self._storage,
            f'{_DATASETS}.Apply': self._storage,
            f'{_DATASETS}.Upload': self._storage,
            f'{_CHECKPOINTS}.UploadCheckpoint': self._storage,
        }
        """Functions by the full name of the method; methods without quotas are absent."""

    @asynccontextmanager
    async def _creation(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        del context
        async with self._limits.creating(current_caller().tenant_id) as limit:
            yield request if limit is None else refused_creation(request, limit)

    @asynccontextmanager
    async def _operation(self, request: bytes, context: Context) -> AsyncIterator[bytes]:
        remaining: Any = context.time_remaining()
        patience = self._patience_seconds if remaining is None else min(remaining, self._patience_seconds)
        yield await admitted_operation(self._limits, current_caller().tenant_id, request, patience_seconds=patience)

    @asynccontextmanager
    async def _operations(
        self, requests: AsyncIterator[bytes], context: Context
    ) -> AsyncIterator[AsyncIterator[bytes]]:
        """Yield a stream with each operation once it is admitted; until then, back-pressure slows the client down."""
        del context
        tenant_id = current_caller().tenant_id

        async def admitted() -> AsyncIterator[bytes]:
            async for request in requests:
                yield await admitted_operation(self._limits, tenant_id, request, patience_seconds=None)

        yield admitted()

    @asynccontextmanager
    async def _storage(self, request: Request, context: Context) -> AsyncIterator[Request]:
        """Check the free storage before a method that stores data."""
        del context
        await self._limits.check_storage(current_caller().tenant_id)
        yield request
