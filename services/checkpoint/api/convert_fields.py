"""Fields that several messages have, checked."""

from datetime import timedelta

from google.protobuf import duration_pb2

from services.checkpoint.domain.keys import NAME_RULE, is_name
from services.kit.errors import InvalidField

_LONGEST_TTL = timedelta(days=365 * 100)


def name_from_proto(name: str, field: str) -> str:
    """Return a name that may stand in a path.

    Raises:
        InvalidField: it may not.
    """
    if not is_name(name):
        raise InvalidField(field, f'must be {NAME_RULE}')
    return name


def not_negative(number: int, field: str) -> int:
    """Return a number that is not negative.

    Raises:
        InvalidField: it is.
    """
    if number < 0:
        raise InvalidField(field, f'must not be negative, got {number}')
    return number


def ttl_from_proto(duration: duration_pb2.Duration, field: str) -> timedelta:
    """Return how long something is kept.

    Raises:
        InvalidField: it is not positive, or longer than a century.
    """
    seconds = duration.seconds + duration.nanos / 1e9
    if not 0 < seconds <= _LONGEST_TTL.total_seconds():
        raise InvalidField(field, f'must be positive and at most {_LONGEST_TTL.days} days, got {seconds} seconds')
    return timedelta(seconds=seconds)
