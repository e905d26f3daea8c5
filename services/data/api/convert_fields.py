"""Fields that several requests have, checked."""

import hashlib

from google.protobuf.message import Message

from services.kit.errors import InvalidField

_ID_LENGTH = 256


def id_from_proto(value: str, field: str) -> str:
    """Return an id.

    Raises:
        InvalidField: it is empty or too long to be one.
    """
    if not value or len(value) > _ID_LENGTH:
        raise InvalidField(field, f'must have 1 to {_ID_LENGTH} characters')
    return value


def not_negative(value: int, field: str) -> int:
    """Return a count or offset.

    Raises:
        InvalidField: it is negative.
    """
    if value < 0:
        raise InvalidField(field, f'must be at least 0, got {value}')
    return value


def fingerprint_of(request: Message) -> str:
    """Return a digest of a request's content, the same for the same content."""
    return hashlib.blake2s(request.SerializeToString(deterministic=True)).hexdigest()
