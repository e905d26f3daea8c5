"""Converts messages of the catalogue contract, and checks the fields of requests."""

import copy
from collections.abc import Mapping
from datetime import UTC

from services.gateway.catalogue.rules import Checkpoint, CheckpointFilter, Run, RunFilter
from services.kit.errors import InvalidField
from services.kit.rpc.fields import (
    fingerprint_of,
    id_from_proto,
    labels_from_proto,
    time_from_proto,
    timestamp_to_proto,
)
from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages
from twinkle.api.model.v1 import adapter_pb2
from twinkle.data_format import base_model_id

MAX_FILTER_LABELS = 16
"""Maximum number of labels in a filter."""


def run_filter_from_proto(request: messages.ListRunsRequest) -> RunFilter:
    """Return the filter for runs.

    Raises:
        InvalidField: an id or a label is invalid, or there are too many labels.
    """
    return RunFilter(
        base_model=_id_or_none(base_model_id(request.base_model), 'base_model'),
        session_id=_id_or_none(request.session_id, 'session_id'),
        user_metadata=_labels(request.user_metadata),
        is_active=request.is_active if request.HasField('is_active') else None,
    )


def checkpoint_filter_from_proto(request: messages.ListRunCheckpointsRequest) -> CheckpointFilter:
    """Return the filter for checkpoints.

    Raises:
        InvalidField: an id or a label is invalid, a time is out of range, or there are too many labels.
    """
    return CheckpointFilter(
        run_id=_id_or_none(request.run_id, 'run_id'),
        base_model=_id_or_none(base_model_id(request.base_model), 'base_model'),
        is_optimizer_included=request.is_optimizer_included if request.HasField('is_optimizer_included') else None,
        is_public=request.is_public if request.HasField('is_public') else None,
        begin_time=time_from_proto(request, 'begin_time'),
        end_time=time_from_proto(request, 'end_time'),
        user_metadata=_labels(request.user_metadata),
    )


def query_of(request: messages.ListRunsRequest | messages.ListRunCheckpointsRequest, tenant_id: str) -> tuple[str, ...]:
    """Return the query that a page token belongs to: the method, the tenant and all filters."""
    filters = copy.deepcopy(request)
    filters.ClearField('page_size')
    filters.ClearField('page_token')
    return (type(request).__name__, tenant_id, fingerprint_of(filters))


def run_from_proto(adapter: adapter_pb2.Adapter, *, tenant_id: str) -> Run:
    """Return the run of an adapter in training."""
    return Run(
        run_id=adapter.adapter_id,
        tenant_id=tenant_id,
        base_model=adapter.base_model,
        lora_rank=adapter.lora_config.lora_rank,
        step_count=adapter.step_count,
        version=adapter.version,
        user_metadata=dict(adapter.user_metadata),
        is_active=True,
        create_time=adapter.create_time.ToDatetime(tzinfo=UTC),
        update_time=adapter.update_time.ToDatetime(tzinfo=UTC),
        session_id=adapter.session_id,
    )


def checkpoint_from_proto(message: checkpoint_pb2.Checkpoint, *, tenant_id: str) -> Checkpoint:
    """Return a tenant's checkpoint, as the checkpoint service reports it."""
    return Checkpoint(
        checkpoint_id=message.checkpoint_id,
        tenant_id=tenant_id,
        run_id=message.adapter_id,
        name=message.name,
        path=message.path,
        base_model=message.base_model,
        is_optimizer_included=message.is_optimizer_included,
        size_bytes=message.size_bytes,
        step_count=message.step_count,
        digest=message.digest,
        folder=message.folder,
        create_time=message.create_time.ToDatetime(tzinfo=UTC),
        expire_time=message.expire_time.ToDatetime(tzinfo=UTC) if message.HasField('expire_time') else None,
        is_public=message.is_public,
        user_metadata=dict(message.user_metadata),
        lora_rank=message.lora_rank,
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
