"""Serves the contract for the catalogue: what is overridden here is built."""

from typing import Any

import grpc

from services.gateway.api import convert
from services.gateway.application.get_run import GetRun
from services.gateway.application.list_run_checkpoints import ListRunCheckpoints
from services.gateway.application.list_runs import ListRuns
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.gateway.v1 import catalogue_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class CatalogueServicer(catalogue_service_pb2_grpc.CatalogueServiceServicer):
    """Converts, calls the verb, converts."""

    def __init__(self, *, get_run: GetRun, list_runs: ListRuns, list_run_checkpoints: ListRunCheckpoints) -> None:
        """Serve these verbs."""
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
        query = ('ListRuns', current_caller().tenant_id, request.base_model)
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        base_model = convert.filter_from_proto(request.base_model, 'base_model')
        listing = await self._list_runs(current_caller(), page, base_model=base_model)
        return messages.ListRunsResponse(
            runs=map(convert.run_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )

    async def ListRunCheckpoints(  # noqa: N802 (the contract's name)
        self, request: messages.ListRunCheckpointsRequest, context: Context
    ) -> messages.ListRunCheckpointsResponse:
        """List the caller's checkpoints."""
        query = ('ListRunCheckpoints', current_caller().tenant_id, request.run_id)
        page = convert.page_from_proto(request.page_size, request.page_token, query=query)
        run_id = convert.filter_from_proto(request.run_id, 'run_id')
        listing = await self._list_run_checkpoints(current_caller(), page, run_id=run_id)
        return messages.ListRunCheckpointsResponse(
            checkpoints=map(convert.checkpoint_to_proto, listing.items),
            next_page_token=convert.next_token(listing.next_cursor, query=query),
        )
