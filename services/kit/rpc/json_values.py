"""Conversion of JSON values between `Struct` or `Value` messages and Python.

Structs contain doubles only, so numbers without a fraction become integers if their absolute value is below 2**53.
Infinity and NaN are allowed, although JSON has neither.
"""

from collections.abc import Mapping
from typing import Any

from google.protobuf.struct_pb2 import ListValue, Struct, Value

from services.kit.errors import InvalidField

_EXACT_INTEGERS = 1 << 53
"""Doubles represent every integer with a smaller absolute value exactly."""


def dict_from_struct(struct: Struct) -> dict[str, Any]:
    """Return a struct as a dictionary sorted by name.

    The order of the fields in a message differs between processes, but journals and checkpoints need a fixed order.
    """
    return {name: value_from_proto(struct.fields[name]) for name in sorted(struct.fields)}


def value_from_proto(value: Value) -> Any:
    """Return the JSON value of a message; numbers without a fraction become integers, as the module describes."""
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
    """Return the struct of a mapping of JSON values.

    Raises:
        InvalidField: See `value_to_proto`.
    """
    struct = Struct()
    for name, value in values.items():
        struct.fields[name].CopyFrom(value_to_proto(value))
    return struct


def value_to_proto(value: Any) -> Value:
    """Return the message of a JSON value; tuples become lists.

    Raises:
        InvalidField: An integer exceeds the range of the message's 64-bit floating-point numbers.
    """
    if value is None:
        return Value(null_value=0)  # pyright: ignore[reportArgumentType] (the enum's only value)
    if isinstance(value, bool):
        return Value(bool_value=value)
    if isinstance(value, int | float):
        try:
            return Value(number_value=value)
        except OverflowError as error:
            raise InvalidField('body', 'contains an integer that is too large') from error
    if isinstance(value, str):
        return Value(string_value=value)
    if isinstance(value, Mapping):
        return Value(struct_value=struct_of(value))  # pyright: ignore[reportUnknownArgumentType]
    return Value(list_value=ListValue(values=[value_to_proto(item) for item in value]))
