"""Filters for lists of runs and checkpoints, with the field names of the contract."""

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict

from google.protobuf.timestamp_pb2 import Timestamp

from twinkle.api.gateway.v1 import catalogue_service_pb2 as pb
from twinkle_client.convert.labels import labels

PAGE_SIZE = 1000
"""Page size of list requests: the maximum that the contract allows."""


class RunFilters(TypedDict, total=False):
    """Conditions that a listed run must satisfy; unset conditions are ignored."""

    base_model: str
    """Name of the base model."""
    session_id: str
    """Session in which the run was created."""
    user_metadata: Mapping[str, str] | None
    """Labels and values that the run must have, at most 16."""
    is_active: bool | None
    """True: runs that can be trained now. False: all other runs."""


class CheckpointFilters(TypedDict, total=False):
    """Conditions that a listed checkpoint must satisfy; unset conditions are ignored."""

    base_model: str
    """Name of the base model."""
    is_optimizer_included: bool | None
    """True: checkpoints from which training can resume. False: all other checkpoints."""
    is_public: bool | None
    """True: checkpoints that every tenant can read. False: all other checkpoints."""
    begin_time: datetime | None
    """Earliest commit time, inclusive; local time if it has no time zone."""
    end_time: datetime | None
    """Latest commit time, exclusive; local time if it has no time zone."""
    user_metadata: Mapping[str, str] | None
    """Labels and values that the checkpoint must have, at most 16."""


def runs_request(filters: RunFilters) -> pb.ListRunsRequest:
    """Return the request that lists the matching runs.

    Raises:
        TypeError: A filter is unknown, or a label is not a string.
    """
    _check(filters, RunFilters)
    return pb.ListRunsRequest(
        page_size=PAGE_SIZE,
        base_model=filters.get('base_model', ''),
        session_id=filters.get('session_id', ''),
        user_metadata=labels(filters.get('user_metadata')),
        is_active=filters.get('is_active'),
    )


def checkpoints_request(run_id: str, filters: CheckpointFilters) -> pb.ListRunCheckpointsRequest:
    """Return the request that lists the matching checkpoints of a run, or of all runs if `run_id` is empty.

    Raises:
        TypeError: A filter is unknown, a label is not a string, or a time is not a datetime.
        ValueError: `end_time` is not later than `begin_time`.
    """
    _check(filters, CheckpointFilters)
    begin, end = (_timestamp(filters.get(name)) for name in ('begin_time', 'end_time'))
    if begin and end and begin.ToNanoseconds() >= end.ToNanoseconds():
        raise ValueError(f'end_time must be later than begin_time, got {begin.ToJsonString()} to {end.ToJsonString()}')
    return pb.ListRunCheckpointsRequest(
        run_id=run_id,
        page_size=PAGE_SIZE,
        base_model=filters.get('base_model', ''),
        is_optimizer_included=filters.get('is_optimizer_included'),
        is_public=filters.get('is_public'),
        begin_time=begin,
        end_time=end,
        user_metadata=labels(filters.get('user_metadata')),
    )


def _check(filters: Mapping[str, object], kind: type) -> None:
    unknown = sorted(set(filters) - set(kind.__annotations__))
    if unknown:
        raise TypeError(f'unknown filters {", ".join(unknown)}; known filters are {", ".join(kind.__annotations__)}')


def _timestamp(time: object) -> Timestamp | None:
    if time is None:
        return None
    if not isinstance(time, datetime):
        # An ignored bound would silently list every checkpoint.
        raise TypeError(f'begin_time and end_time must be datetimes, got {type(time).__name__}')
    timestamp = Timestamp()
    timestamp.FromDatetime(time.astimezone())
    return timestamp
