"""Which runs and checkpoints a list is asked for: the contract's filters, by the contract's names."""

from collections.abc import Mapping
from datetime import datetime
from typing import TypedDict

from google.protobuf.timestamp_pb2 import Timestamp

from twinkle.api.gateway.v1 import catalogue_service_pb2 as pb
from twinkle_client.convert.labels import labels

PAGE_SIZE = 1000
"""Of every list; the most that the contract allows."""


class RunFilters(TypedDict, total=False):
    """What runs must be like, all of it together; what is left out does not matter."""

    base_model: str
    """Of this base model."""
    session_id: str
    """Begun in this session."""
    user_metadata: Mapping[str, str] | None
    """With all of these labels, at most 16, with these values."""
    is_active: bool | None
    """True: they can be trained on now. False: only the others."""


class CheckpointFilters(TypedDict, total=False):
    """What checkpoints must be like, all of it together; what is left out does not matter."""

    base_model: str
    """Of this base model."""
    is_optimizer_included: bool | None
    """True: training can resume from them. False: only the others."""
    is_public: bool | None
    """True: every tenant may read them. False: only the others."""
    begin_time: datetime | None
    """Committed at this moment or later; without a time zone it is this machine's local time."""
    end_time: datetime | None
    """Committed before this moment; read like `begin_time`."""
    user_metadata: Mapping[str, str] | None
    """With all of these labels, at most 16, with these values."""


def runs_request(filters: RunFilters) -> pb.ListRunsRequest:
    """Return the question for the runs that fit.

    Raises:
        TypeError: there is no such filter, or a label is no string.
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
    """Return the question for the checkpoints that fit, of a run or, where it is empty, of all.

    Raises:
        TypeError: there is no such filter, or a label is no string.
        ValueError: the time ends before it begins.
    """
    _check(filters, CheckpointFilters)
    begin, end = (_moment(filters.get(name)) for name in ('begin_time', 'end_time'))
    if begin and end and begin.ToNanoseconds() >= end.ToNanoseconds():
        raise ValueError('end_time must be later than begin_time')
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
        raise TypeError(f'there is no filter {", ".join(unknown)}; the filters are {", ".join(kind.__annotations__)}')


def _moment(time: object) -> Timestamp | None:
    if time is None:
        return None
    if not isinstance(time, datetime):
        raise TypeError(f'a time is a datetime, not {type(time).__name__}; else everything would be listed')
    moment = Timestamp()
    moment.FromDatetime(time.astimezone())
    return moment
