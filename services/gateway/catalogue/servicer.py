"""Serves the contract for the catalogue, and converts its messages.

Functions raise InvalidField if an id, a label or a time is invalid, or if there are too many labels.
"""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import Mapping

from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.gateway.v1 import catalogue_service_pb2_grpc
from twinkle.data_format import base_model_id
from twinkle_services.gateway.catalogue.checkpoints import Checkpoints
from twinkle_services.gateway.catalogue.rules import Checkpoint, CheckpointFilter, Run, RunFilter
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.page_tokens import next_token, page_from_proto, query_of
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import (
    id_from_proto,
    labels_from_proto,
    text_from_proto,
    time_from_proto,
    timestamp_to_proto,
)

MAX_FILTER_LABELS = 16
"""Maximum number of labels in a filter."""
_PATH_LENGTH = 512


class CatalogueServicer(catalogue_service_pb2_grpc.CatalogueServiceServicer):
    """Implements `CatalogueService`, except `GetUsage`, which `quotas.servicer` adds."""

    def __init__(self, runs: Runs, checkpoints: Checkpoints) -> None:
        self._runs = runs
        self._checkpoints = checkpoints

    async def GetRun(self, request: messages.GetRunRequest, context: Context) -> messages.GetRunResponse:
        run = await self._runs.get(current_caller(), id_from_proto(request.run_id, 'run_id'))
        return messages.GetRunResponse(run=run_to_proto(run))

    async def ListRuns(self, request: messages.ListRunsRequest, context: Context) -> messages.ListRunsResponse:
        query = query_of(request)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._runs.list(current_caller(), page, run_filter_from_proto(request))
        return messages.ListRunsResponse(
            runs=map(run_to_proto, listing.items), next_page_token=next_token(listing.next_cursor, query=query)
        )

    async def ListRunCheckpoints(
        self, request: messages.ListRunCheckpointsRequest, context: Context
    ) -> messages.ListRunCheckpointsResponse:
        query = query_of(request)
        page = page_from_proto(request.page_size, request.page_token, query=query)
        listing = await self._checkpoints.list(current_caller(), page, checkpoint_filter_from_proto(request))
        return messages.ListRunCheckpointsResponse(
            checkpoints=map(checkpoint_to_proto, listing.items),
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


def run_filter_from_proto(request: messages.ListRunsRequest) -> RunFilter:
    return RunFilter(
        base_model=_id_or_none(base_model_id(request.base_model), 'base_model'),
        session_id=_id_or_none(request.session_id, 'session_id'),
        user_metadata=_labels(request.user_metadata),
        is_active=request.is_active if request.HasField('is_active') else None,
    )


def checkpoint_filter_from_proto(request: messages.ListRunCheckpointsRequest) -> CheckpointFilter:
    return CheckpointFilter(
        run_id=_id_or_none(request.run_id, 'run_id'),
        base_model=_id_or_none(base_model_id(request.base_model), 'base_model'),
        is_optimizer_included=request.is_optimizer_included if request.HasField('is_optimizer_included') else None,
        is_public=request.is_public if request.HasField('is_public') else None,
        begin_time=time_from_proto(request, 'begin_time'),
        end_time=time_from_proto(request, 'end_time'),
        user_metadata=_labels(request.user_metadata),
    )


def run_to_proto(run: Run) -> messages.Run:
    return messages.Run(
        run_id=run.run_id,
        base_model=run.base_model,
        lora_rank=run.lora_rank,
        step_count=run.step_count,
        version=run.version,
        user_metadata=run.user_metadata,
        is_active=run.is_active,
        create_time=timestamp_to_proto(run.create_time),
        update_time=timestamp_to_proto(run.update_time),
    )


def checkpoint_to_proto(checkpoint: Checkpoint) -> checkpoint_pb2.Checkpoint:
    return checkpoint_pb2.Checkpoint(
        checkpoint_id=checkpoint.checkpoint_id,
        adapter_id=checkpoint.run_id,
        name=checkpoint.name,
        path=checkpoint.path,
        base_model=checkpoint.base_model,
        is_optimizer_included=checkpoint.is_optimizer_included,
        size_bytes=checkpoint.size_bytes,
        step_count=checkpoint.step_count,
        digest=checkpoint.digest,
        folder=checkpoint.folder,
        create_time=timestamp_to_proto(checkpoint.create_time),
        expire_time=timestamp_to_proto(checkpoint.expire_time) if checkpoint.expire_time else None,
        is_public=checkpoint.is_public,
        user_metadata=checkpoint.user_metadata,
        lora_rank=checkpoint.lora_rank,
    )


def _id_or_none(value: str, field: str) -> str | None:
    return id_from_proto(value, field) if value else None


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > MAX_FILTER_LABELS:
        raise InvalidField('user_metadata', f'has {len(labels)} labels; a filter takes at most {MAX_FILTER_LABELS}')
    return labels_from_proto(labels, 'user_metadata')
