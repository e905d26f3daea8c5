"""Converts messages of quotas and usage from and to values, with every input check."""

import math
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.quotas.rules import MAX_WEIGHT, MIN_WEIGHT, Quota, TimeRange, Usage
from services.kit.errors import InvalidField
from twinkle.api.gateway.v1 import catalogue_service_pb2, quota_service_pb2

_LEAST = {
    'max_adapters': 0,
    'tokens_per_second': 1,
    'burst_tokens': 1,
    'concurrent_samples': 0,
    'stored_bytes': 0,
}


def quota_from_proto(message: Any, field: str) -> Quota:
    """Convert a `Quota` message.

    Raises:
        InvalidField: a limit is out of range.
    """
    values: dict[str, Any] = {item.name: getattr(message, item.name) for item in fields(Quota)}
    values = {name: value for name, value in values.items() if message.HasField(name)}
    for name, least in _LEAST.items():
        if values.get(name, least) < least:
            raise InvalidField(f'{field}.{name}', f'must be at least {least}, got {values[name]}')
    weight = values.get('weight', MIN_WEIGHT)
    if not math.isfinite(weight) or not MIN_WEIGHT <= weight <= MAX_WEIGHT:
        raise InvalidField(f'{field}.weight', f'must be from {MIN_WEIGHT} to {MAX_WEIGHT}, got {weight}')
    return Quota(**values)


def quota_to_proto(quota: Quota) -> quota_service_pb2.Quota:
    """Convert a quota; limits without a value stay unset."""
    return quota_service_pb2.Quota(**vars(quota))


def period_from_proto(request: Any) -> TimeRange:
    """Return the period between a request's `begin_time` and `end_time`.

    Raises:
        InvalidField: a time is out of range, or the end is before the begin.
    """
    begin, end = _moment(request, 'begin_time'), _moment(request, 'end_time')
    if begin is not None and end is not None and end < begin:
        raise InvalidField('end_time', 'must not be before begin_time')
    return TimeRange(begin=begin, end=end)


def usages_to_proto(usages: Iterable[Usage]) -> list[catalogue_service_pb2.Usage]:
    return [
        catalogue_service_pb2.Usage(run_id=item.run_id, stored_bytes=item.stored_bytes, **vars(item.work))
        for item in usages
    ]


def _moment(request: Any, name: str) -> datetime | None:
    if not request.HasField(name):
        return None
    stamp: Timestamp = getattr(request, name)
    try:
        return stamp.ToDatetime(tzinfo=UTC)
    except (ValueError, OverflowError) as error:
        raise InvalidField(name, 'is not a time in the years 1 to 9999') from error
