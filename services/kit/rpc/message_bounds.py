"""Limits on the options in a message, and the conversion of large messages outside the event loop."""

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar, cast

from google.protobuf.message import Message
from google.protobuf.struct_pb2 import Struct, Value

from twinkle_services.kit.errors import InvalidField

MAX_OPTION_BYTES = 64 << 10
"""Maximum size of a message with options, such as a training configuration."""
MAX_LIST_ITEMS = 1000
"""Maximum number of items in each list of a message with options."""
THREAD_BYTES = 32 << 10
"""Messages of this size or more are converted in a thread, because they would block the event loop for milliseconds."""
_MessageT = TypeVar('_MessageT', bound=Message)
_Result = TypeVar('_Result')


def check_options(message: Message, field: str) -> None:
    """Check the size and the lists of a message with options. Such messages stay in memory and are copied often.

    Raises:
        InvalidField: The message is too large or has a list with too many items; the error names the field.
    """
    check_bytes(message, field, limit=MAX_OPTION_BYTES)
    _check_lists(message, field)


def check_bytes(message: Message, field: str, *, limit: int) -> None:
    """Check the serialized size of a message.

    Raises:
        InvalidField: The message is too large; the error names its innermost part that is too large on its own.
    """
    size_bytes = message.ByteSize()
    if size_bytes <= limit:
        return
    for descriptor, value in message.ListFields():
        if isinstance(value, Message):
            check_bytes(value, f'{field}.{descriptor.name}', limit=limit)
    raise InvalidField(field, f'must have at most {limit} bytes, got {size_bytes}')


async def convert_large(convert: Callable[[_MessageT], _Result], message: _MessageT) -> _Result:
    """Return `convert(message)`, which runs in a thread if the message is large."""
    if message.ByteSize() < THREAD_BYTES:
        return convert(message)
    return await asyncio.to_thread(convert, message)


def _check_lists(message: Message, field: str) -> None:
    if isinstance(message, Struct):
        for name in message.fields:
            _check_value(message.fields[name], f'{field}.{name}')
        return
    for descriptor, value in message.ListFields():
        path = f'{field}.{descriptor.name}'
        if isinstance(value, Message):
            _check_lists(value, path)
        elif descriptor.is_repeated:
            _check_count(len(value), path)
            items = value if descriptor.message_type and not _is_map(descriptor) else ()
            for index, item in enumerate(cast('list[Message]', items)):
                _check_lists(item, f'{path}[{index}]')


def _check_value(value: Value, field: str) -> None:
    if value.HasField('struct_value'):
        _check_lists(value.struct_value, field)
    elif value.HasField('list_value'):
        _check_count(len(value.list_value.values), field)
        for index, item in enumerate(value.list_value.values):
            _check_value(item, f'{field}[{index}]')


def _check_count(count: int, field: str) -> None:
    if count > MAX_LIST_ITEMS:
        raise InvalidField(field, f'must have at most {MAX_LIST_ITEMS} items, got {count}')


def _is_map(descriptor: Any) -> bool:
    return descriptor.message_type.GetOptions().map_entry
