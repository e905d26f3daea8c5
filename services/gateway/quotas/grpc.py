"""Clients of the services that report usage: meters of runs, and the sizes of datasets."""

from __future__ import annotations

from collections.abc import AsyncIterator

import grpc

from services.gateway.catalogue.grpc import entry_events
from services.gateway.catalogue.rules import CatalogueEvent
from services.gateway.quotas.rules import Reading
from services.kit.caller import Caller
from services.kit.rpc.channel import forwarded_metadata
from services.kit.rpc.context import acting_for
from services.kit.rpc.status import error_from_call
from twinkle.api.data.v1 import dataset_service_pb2, dataset_service_pb2_grpc
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc

_TIMEOUT_SECONDS = 10.0


class GrpcMeterFeed:
    """Follows the meters of all tenants' runs over a channel that carries the gateway's internal identity."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)

    def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Reading]]:
        call = self._stub.WatchAdapters(adapter_service_pb2.WatchAdaptersRequest(resume_token=resume_token))
        return entry_events(call, _reading_of, id_field='adapter_id', service='model')


class GrpcDatasetSizes:
    """Implements `DatasetSizes` over a channel without credentials. Without a channel, all sizes are 0."""

    def __init__(self, channel: grpc.aio.Channel | None, *, internal_token: str) -> None:
        self._stub = None if channel is None else dataset_service_pb2_grpc.DatasetServiceStub(channel)
        self._internal_token = internal_token

    async def stored_bytes(self, tenant_id: str) -> int:
        if self._stub is None:
            return 0
        with acting_for(Caller(tenant_id=tenant_id)):
            metadata = forwarded_metadata(self._internal_token, is_internal=True)
        request = dataset_service_pb2.GetStoredBytesRequest()
        try:
            stored = await self._stub.GetStoredBytes(request, timeout=_TIMEOUT_SECONDS, metadata=metadata)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='data') from error
        return stored.dataset_bytes + stored.upload_bytes


def _reading_of(message: adapter_service_pb2.WatchAdaptersResponse) -> Reading:
    return Reading(
        run_id=message.adapter.adapter_id,
        tenant_id=message.tenant_id,
        trained_token_count=message.adapter.trained_token_count,
        operation_count=message.adapter.sequence_number,
    )
