"""Between messages and values of quotas and usage, with every input check."""

import math
from collections.abc import Iterable
from dataclasses import fields
from datetime import UTC, datetime
from typing import Any

from google.protobuf.timestamp_pb2 import Timestamp

from services.gateway.quotas.get_usage import Span
from services.gateway.quotas.rules import MAX_WEIGHT, MIN_WEIGHT, Quota
from services.gateway.quotas.usage import Usage
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
    """Return the quota of a `Quota` message.

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
    """Return the message; what is not set is unset there."""
    return quota_service_pb2.Quota(**vars(quota))


def span_from_proto(request: Any) -> Span:
    """Return the time that a request asks for.

    Raises:
        InvalidField: a moment is none, or the end is before the beginning.
    """
    begin, end = _moment(request, 'begin_time'), _moment(request, 'end_time')
    if begin is not None and end is not None and end < begin:
        raise InvalidField('end_time', 'must not be before begin_time')
    return Span(begin=begin, end=end)


def usages_to_proto(usages: Iterable[Usage]) -> list[catalogue_service_pb2.Usage]:
    """Return the messages."""
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
        raise InvalidField(name, 'is no moment of the years 1 to 9999') from error
