"""Conversion of JSON values between `Struct` or `Value` messages and Python.

Structs contain doubles only, so numbers without a fraction become integers if their absolute value is below 2**53.
Infinity and NaN are allowed, although JSON has neither.
"""

from collections.abc import Mapping
from typing import Any, cast

from google.protobuf.struct_pb2 import Struct, Value

from twinkle_services.kit.errors import InvalidField

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
        _set_value(struct.fields[name], value)
    return struct


def value_to_proto(value: Any) -> Value:
    """Return the message of a JSON value; tuples become lists.

    Raises:
        InvalidField: An integer exceeds the range of the message's 64-bit floating-point numbers.
    """
    message = Value()
    _set_value(message, value)
    return message


def _set_value(message: Value, value: Any) -> None:
    """Set a message inside its parent. Separate messages, which are then copied, would take 600 bytes each."""
    if value is None:
        message.null_value = 0  # pyright: ignore[reportAttributeAccessIssue] (the enum's only value)
    elif isinstance(value, bool):
        message.bool_value = value
    elif isinstance(value, int | float):
        try:
            message.number_value = value
        except OverflowError as error:
            raise InvalidField('body', 'contains an integer that is too large') from error
    elif isinstance(value, str):
        message.string_value = value
    elif isinstance(value, Mapping):
        message.struct_value.SetInParent()
        fields = message.struct_value.fields
        for name, item in cast('Mapping[str, Any]', value).items():
            _set_value(fields[name], item)
    else:
        message.list_value.SetInParent()
        values = message.list_value.values
        for item in value:
            _set_value(values.add(), item)
