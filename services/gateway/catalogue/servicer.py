"""Serves the contract for the catalogue."""

# ruff: noqa: N802 (the methods have the contract's names)

from typing import Any

import grpc

from services.gateway.catalogue import convert
from services.gateway.catalogue.checkpoints import Checkpoints
from services.gateway.catalogue.runs import Runs
from services.gateway.page_tokens import next_token, page_from_proto
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto, text_from_proto
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.gateway.v1 import catalogue_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_PATH_LENGTH = 512


class CatalogueServicer(catalogue_service_pb2_grpc.CatalogueServiceServicer):
    """Implements `CatalogueService`, except `GetUsage`, which `quotas.servicer` adds."""

    def __init__(self, runs: Runs, checkpoints: Checkpoints) -> None:
        self._runs = runs
        self._checkpoints = checkpoints

    async def GetRun(self, request: messages.GetRunRequest, context: Context) -> messages.GetRunResponse:
        run = await self._runs.get(current_caller(), id_from_proto(request.run_id, 'run_id'))
        return messages.GetRunResponse(run=convert.run_to_proto(run))

    async def ListRuns(self, request: messages.ListRunsRequest, context: Context) -> messages.ListRunsResponse:
        query = convert.query_of(request, current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._runs.list(current_caller(), page, convert.run_filter_from_proto(request))
        return messages.ListRunsResponse(
            runs=map(convert.run_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def ListRunCheckpoints(
        self, request: messages.ListRunCheckpointsRequest, context: Context
    ) -> messages.ListRunCheckpointsResponse:
        query = convert.query_of(request, current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._checkpoints.list(current_caller(), page, convert.checkpoint_filter_from_proto(request))
        return messages.ListRunCheckpointsResponse(
            checkpoints=map(convert.checkpoint_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def PublishCheckpoint(
        self, request: messages.PublishCheckpointRequest, context: Context
    ) -> messages.PublishCheckpointResponse:
        path = text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH)
        await self._checkpoints.set_public(path, is_public=True)
        return messages.PublishCheckpointResponse()

    async def UnpublishCheckpoint(
        self, request: messages.UnpublishCheckpointRequest, context: Context
    ) -> messages.UnpublishCheckpointResponse:
        path = text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH)
        await self._checkpoints.set_public(path, is_public=False)
        return messages.UnpublishCheckpointResponse()
