"""Fields that several requests have, checked."""

import hashlib
from collections.abc import Mapping
from typing import Any

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import ListValue, Struct, Value

from services.kit.errors import InvalidField

_ID_LENGTH = 256
_EXACT_INTEGERS = 1 << 53
"""Doubles hold every integer below this."""


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


def dict_from_struct(struct: Struct) -> dict[str, Any]:
    """Return a struct as a dict; numbers without a fraction become integers."""
    return {name: value_from_proto(value) for name, value in struct.fields.items()}


def value_from_proto(value: Value) -> Any:
    """Return a JSON value; numbers without a fraction become integers."""
    match value.WhichOneof('kind'):
        case 'number_value':
            number = value.number_value
            return int(number) if abs(number) < _EXACT_INTEGERS and number == int(number) else number
        case 'string_value':
            return value.string_value
        case 'bool_value':
            return value.bool_value
        case 'struct_value':
            return dict_from_struct(value.struct_value)
        case 'list_value':
            return [value_from_proto(item) for item in value.list_value.values]
        case _:
            return None


def struct_of(values: Mapping[str, Any]) -> Struct:
    """Return a mapping of JSON values as a struct."""
    struct = Struct()
    for name, value in values.items():
        struct.fields[name].CopyFrom(value_to_proto(value))
    return struct


def value_to_proto(value: Any) -> Value:
    """Return a JSON value as a message."""
    if value is None:
        return Value(null_value=0)  # pyright: ignore[reportArgumentType] (the enum's only value)
    if isinstance(value, bool):
        return Value(bool_value=value)
    if isinstance(value, int | float):
        return Value(number_value=value)
    if isinstance(value, str):
        return Value(string_value=value)
    if isinstance(value, Mapping):
        return Value(struct_value=struct_of(value))  # pyright: ignore[reportUnknownArgumentType]
    return Value(list_value=ListValue(values=[value_to_proto(item) for item in value]))
