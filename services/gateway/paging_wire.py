"""Which runs and checkpoints a list is asked for, with every check of the fields."""

import copy
from collections.abc import Mapping
from datetime import UTC, datetime

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.catalogue.rules import CheckpointFilter, RunFilter
from services.kit.errors import InvalidField
from services.kit.rpc.fields import fingerprint_of, id_from_proto, labels_from_proto
from twinkle.api.gateway.v1 import catalogue_service_pb2 as messages

MOST_LABELS = 16
"""That a list may ask for."""


def run_filter_from_proto(request: messages.ListRunsRequest) -> RunFilter:
    """Return which runs are asked for.

    Raises:
        InvalidField: a field is out of range.
    """
    return RunFilter(
        base_model=_id_or_none(request.base_model, 'base_model'),
        session_id=_id_or_none(request.session_id, 'session_id'),
        user_metadata=_labels(request.user_metadata),
        is_active=request.is_active if request.HasField('is_active') else None,
    )


def checkpoint_filter_from_proto(request: messages.ListRunCheckpointsRequest) -> CheckpointFilter:
    """Return which checkpoints are asked for.

    Raises:
        InvalidField: a field is out of range.
    """
    is_resumable = request.is_optimizer_included if request.HasField('is_optimizer_included') else None
    return CheckpointFilter(
        run_id=_id_or_none(request.run_id, 'run_id'),
        base_model=_id_or_none(request.base_model, 'base_model'),
        is_optimizer_included=is_resumable,
        is_public=request.is_public if request.HasField('is_public') else None,
        begin_time=_moment(request.begin_time, 'begin_time') if request.HasField('begin_time') else None,
        end_time=_moment(request.end_time, 'end_time') if request.HasField('end_time') else None,
        user_metadata=_labels(request.user_metadata),
    )


def query_of(request: messages.ListRunsRequest | messages.ListRunCheckpointsRequest, tenant_id: str) -> tuple[str, ...]:
    """Return what a page token is good for: the method, the tenant and all filters."""
    filters = copy.deepcopy(request)
    for name in ('page_size', 'page_token'):
        filters.ClearField(name)
    return (type(request).__name__, tenant_id, fingerprint_of(filters))


def _id_or_none(value: str, field: str) -> str | None:
    return id_from_proto(value, field) if value else None


def _labels(labels: Mapping[str, str]) -> dict[str, str]:
    if len(labels) > MOST_LABELS:
        raise InvalidField('user_metadata', f'has {len(labels)} labels; a list takes at most {MOST_LABELS}')
    return labels_from_proto(labels, 'user_metadata')


def _moment(timestamp: Timestamp, field: str) -> datetime:
    try:
        return timestamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidField(field, 'is no valid moment') from error
