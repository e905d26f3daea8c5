"""Conversion and checks of fields that several services share: ids, names, counts and times.

The argument `field` of each function is the path of the field in the request, which errors name.
"""

import hashlib
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import Any

from google.protobuf.duration_pb2 import Duration
from google.protobuf.message import Message
from google.protobuf.timestamp_pb2 import Timestamp

from twinkle.data_format import base_model_id
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.names import ADAPTER_ID_RULE, NAME_RULE, is_adapter_id, is_name

MAX_ID_LENGTH = 256
MAX_TTL = timedelta(days=36_500)
MAX_LABELS, MAX_LABEL_LENGTH, MAX_LABEL_VALUE_LENGTH = 64, 256, 4096


def id_from_proto(value: str, field: str) -> str:
    """Return `value` after checking that it is a valid id.

    Raises:
        InvalidField: The id is empty, too long, or has a control character.
    """
    if not value:
        raise InvalidField(field, 'must be set')
    return text_from_proto(value, field, limit=MAX_ID_LENGTH)


def base_model_from_proto(value: str, field: str) -> str:
    """Return the name of a base model in a request; the alias of a built-in model becomes its hub id.

    Raises:
        InvalidField: The name is empty, too long, or has a control character.
    """
    return base_model_id(id_from_proto(value, field))


def text_from_proto(value: str, field: str, *, limit: int) -> str:
    """Return `value`, which may be empty, after checking its length and its characters.

    Raises:
        InvalidField: The text has more than `limit` characters, or a control character.
    """
    if len(value) > limit:
        raise InvalidField(field, f'must have at most {limit} characters, got {len(value)}')
    # Databases and logs differ in the control characters that they accept.
    if any(character < ' ' for character in value):
        raise InvalidField(field, 'must not have control characters')
    return value


def labels_from_proto(labels: Mapping[str, str], field: str) -> dict[str, str]:
    """Check the labels of a resource, and return them sorted by name.

    Raises:
        InvalidField: There are too many labels, or one has no name, is too long or has a control character.
    """
    if len(labels) > MAX_LABELS:
        raise InvalidField(field, f'must have at most {MAX_LABELS} labels, got {len(labels)}')
    if '' in labels:
        raise InvalidField(field, 'must not have a label with an empty name')
    for name, value in labels.items():
        text_from_proto(name, field, limit=MAX_LABEL_LENGTH)
        text_from_proto(value, f'{field}[{name}]', limit=MAX_LABEL_VALUE_LENGTH)
    return dict(sorted(labels.items()))


def name_from_proto(value: str, field: str) -> str:
    """Return `value` after checking that it is a valid name, which can be a part of a path.

    Raises:
        InvalidField: The name is invalid.
    """
    if not is_name(value):
        raise InvalidField(field, f'must be {NAME_RULE}')
    return value


def adapter_id_from_proto(value: str, field: str) -> str:
    """Return `value` after checking that it is a valid adapter id.

    Raises:
        InvalidField: The id is invalid.
    """
    if not is_adapter_id(value):
        raise InvalidField(field, f'must be {ADAPTER_ID_RULE}')
    return value


def not_negative(value: int, field: str) -> int:
    """Return `value`, a count or an offset, after checking that it is not negative.

    Raises:
        InvalidField: The value is negative.
    """
    if value < 0:
        raise InvalidField(field, f'must be at least 0, got {value}')
    return value


def duration_from_proto(message: Duration, field: str, *, minimum: timedelta, maximum: timedelta) -> timedelta:
    """Convert a duration, and check that it is from `minimum` to `maximum`.

    Raises:
        InvalidField: The duration is malformed or out of range.
    """
    try:
        duration = message.ToTimedelta()
    except (ValueError, OverflowError) as error:
        raise InvalidField(field, 'is not a valid duration') from error
    if not minimum <= duration <= maximum:
        range_text = f'{minimum.total_seconds():g} to {maximum.total_seconds():.0f} seconds'
        raise InvalidField(field, f'must be {range_text}, got {duration.total_seconds():g}')
    return duration


def ttl_from_proto(message: Duration, field: str) -> timedelta:
    """Convert a time to live.

    Raises:
        InvalidField: The duration is malformed, less than one second, or more than 36,500 days.
    """
    return duration_from_proto(message, field, minimum=timedelta(seconds=1), maximum=MAX_TTL)


def duration_to_proto(duration: timedelta) -> Duration:
    """Return the message of a duration."""
    message = Duration()
    message.FromTimedelta(duration)
    return message


def timestamp_to_proto(moment: datetime) -> Timestamp:
    """Return the message of a point in time."""
    message = Timestamp()
    message.FromDatetime(moment)
    return message


def time_from_proto(message: Any, field: str) -> datetime | None:
    """Return the time in the field of `message` that is named `field`, in UTC; None if the field is unset.

    Raises:
        InvalidField: The time is out of range.
    """
    try:
        return getattr(message, field).ToDatetime(tzinfo=UTC) if message.HasField(field) else None
    except (ValueError, OverflowError) as error:
        raise InvalidField(field, 'is not a time in the years 1 to 9999') from error


def fingerprint_of(content: Message | bytes) -> str:
    """Return a digest of a request or of its serialized content; equal contents have equal digests."""
    data = content if isinstance(content, bytes) else content.SerializeToString(deterministic=True)
    return hashlib.blake2s(data).hexdigest()
