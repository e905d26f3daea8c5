"""Serves the contract for the catalogue."""

from typing import Any

import grpc

from services.gateway.catalogue import convert
from services.gateway.catalogue.change_checkpoints import ChangeCheckpoints
from services.gateway.catalogue.convert import checkpoint_filter_from_proto, query_of, run_filter_from_proto
from services.gateway.catalogue.get_run import GetRun
from services.gateway.catalogue.list_run_checkpoints import ListRunCheckpoints
from services.gateway.catalogue.list_runs import ListRuns
from services.gateway.page_tokens import next_token, page_from_proto
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto, text_from_proto
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.gateway.v1 import catalogue_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]

_PATH_LENGTH = 512


class CatalogueServicer(catalogue_service_pb2_grpc.CatalogueServiceServicer):
    """Shows runs and checkpoints. GetUsage of the same contract is added by `quotas.servicer`."""

    def __init__(
        self,
        *,
        get_run: GetRun,
        list_runs: ListRuns,
        list_run_checkpoints: ListRunCheckpoints,
        change_checkpoints: ChangeCheckpoints,
    ) -> None:
        """Serve these verbs."""
        self._change_checkpoints = change_checkpoints
        self._get_run = get_run
        self._list_runs = list_runs
        self._list_run_checkpoints = list_run_checkpoints

    async def GetRun(  # noqa: N802 (the contract's name)
        self, request: messages.GetRunRequest, context: Context
    ) -> messages.GetRunResponse:
        """Show a run."""
        run = await self._get_run(current_caller(), id_from_proto(request.run_id, 'run_id'))
        return messages.GetRunResponse(run=convert.run_to_proto(run))

    async def ListRuns(  # noqa: N802 (the contract's name)
        self, request: messages.ListRunsRequest, context: Context
    ) -> messages.ListRunsResponse:
        """List the caller's runs."""
        query = query_of(request, current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._list_runs(current_caller(), page, run_filter_from_proto(request))
        return messages.ListRunsResponse(
            runs=map(convert.run_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def ListRunCheckpoints(  # noqa: N802 (the contract's name)
        self, request: messages.ListRunCheckpointsRequest, context: Context
    ) -> messages.ListRunCheckpointsResponse:
        """List the caller's checkpoints."""
        query = query_of(request, current_caller().tenant_id)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._list_run_checkpoints(current_caller(), page, checkpoint_filter_from_proto(request))
        return messages.ListRunCheckpointsResponse(
            checkpoints=map(convert.checkpoint_to_proto, listing.items),
            next_page_token=next_token(listing.next_cursor, query=query),
        )

    async def PublishCheckpoint(  # noqa: N802 (the contract's name)
        self, request: messages.PublishCheckpointRequest, context: Context
    ) -> messages.PublishCheckpointResponse:
        """Let every tenant read a checkpoint."""
        path = text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH)
        await self._change_checkpoints.set_public(path, is_public=True)
        return messages.PublishCheckpointResponse()

    async def UnpublishCheckpoint(  # noqa: N802 (the contract's name)
        self, request: messages.UnpublishCheckpointRequest, context: Context
    ) -> messages.UnpublishCheckpointResponse:
        """Let its owner alone read a checkpoint."""
        path = text_from_proto(request.checkpoint_path, 'checkpoint_path', limit=_PATH_LENGTH)
        await self._change_checkpoints.set_public(path, is_public=False)
        return messages.UnpublishCheckpointResponse()
