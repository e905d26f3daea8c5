"""The decorator that declares error classes, in the library and in the services.

A class declares annotated fields, and its message is a template that contains them::

    @error_class('the chunk at byte {offset} does not match its checksum')
    class ChunkCorrupt(StateError):
        offset: int

A class without fields may use the decorator with a fixed message, or be an ordinary exception that is raised with a
message.
"""

from collections.abc import Callable
from dataclasses import dataclass, field, fields
from string import Formatter
from types import FunctionType
from typing import Any, TypeVar, dataclass_transform

__all__ = ['error_class']

_Error = TypeVar('_Error', bound=Exception)


@dataclass_transform(eq_default=False, field_specifiers=(field,))
def error_class(message: str = '') -> Callable[[type[_Error]], type[_Error]]:
    """Return a decorator that makes an exception a dataclass with a formatted message. The exception can be pickled.

    Args:
        message: format string over the fields, such as `'no adapter {adapter_id!r}'`. A tuple or list is shown as its
            items with commas between them, or as 'none' if it is empty. Without a message, the class or a base must
            define `__str__`.

    Raises:
        TypeError: the message names something that is not a field, or there is neither a message nor a `__str__`.
    """

    def declare(cls: type[_Error]) -> type[_Error]:
        declared = dataclass(eq=False)(cls)
        if message:
            _check_message(declared, message)
            type.__setattr__(declared, '__str__', _formatter_of(message))
        elif not isinstance(declared.__str__, FunctionType):
            raise TypeError(f'{cls.__name__} has no message; pass one to error_class or define __str__')
        type.__setattr__(declared, '__reduce__', _reduce)
        return declared

    return declare


class _MessageFormatter(Formatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        if isinstance(value, tuple | list):
            return ', '.join(map(str, value)) or 'none'  # pyright: ignore[reportUnknownArgumentType]
        return super().format_field(value, format_spec)


_FORMATTER = _MessageFormatter()


def _check_message(cls: type[Any], message: str) -> None:
    named = {name for _, name, _, _ in _FORMATTER.parse(message) if name is not None}
    unknown = named - {item.name for item in fields(cls)}
    if unknown:
        raise TypeError(f'the message of {cls.__name__} names {sorted(unknown)}, which are not fields of the class')


def _formatter_of(message: str) -> Callable[[object], str]:
    def to_message(self: object) -> str:
        return _FORMATTER.vformat(message, (), vars(self))

    return to_message


def _reduce(self: Exception) -> tuple[Any, ...]:
    """Pickle by attributes, because the constructor may take keywords only."""
    return _rebuild, (type(self), self.args, dict(vars(self)))


def _rebuild(cls: type[_Error], args: tuple[Any, ...], state: dict[str, Any]) -> _Error:
    error = cls.__new__(cls, *args)
    vars(error).update(state)
    return error
