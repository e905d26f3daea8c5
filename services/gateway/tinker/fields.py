"""Reads the fields of a JSON body: those that are known are checked, the others passed over; null is absent."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from services.gateway.http.fields import mapping
from services.kit.errors import InvalidField

Read = TypeVar('Read')


class Fields:
    """The fields of an object, by name; errors tell the path to them."""

    def __init__(self, values: Mapping[str, Any], path: str = '') -> None:
        """Read `values`, which are at `path` in the body."""
        self._values = values
        self._prefix = f'{path}.' if path else ''

    def __contains__(self, name: str) -> bool:
        """Return whether the field is given."""
        return self._values.get(name) is not None

    def raw(self, name: str) -> Any:
        """Return a field as it was sent; None where it was not."""
        return self._values.get(name)

    def path_of(self, name: str) -> str:
        """Return where the field is in the body."""
        return f'{self._prefix}{name}'

    def need(self, name: str, check: Callable[[Any, str], Read]) -> Read:
        """Return a field that must be given.

        Raises:
            InvalidField: it is not, or it is wrong.
        """
        if name not in self:
            raise InvalidField(self.path_of(name), 'is required')
        return check(self._values[name], self.path_of(name))

    def get(self, name: str, check: Callable[[Any, str], Read], default: Read) -> Read:
        """Return a field, or `default` where it is not given.

        Raises:
            InvalidField: it is wrong.
        """
        return check(self._values[name], self.path_of(name)) if name in self else default

    def part(self, name: str) -> 'Fields':
        """Return the fields of an object within, none where it is not given.

        Raises:
            InvalidField: it is no object.
        """
        return Fields(self.get(name, mapping, {}), self.path_of(name))


def bounded_text(least: int, most: int) -> Callable[[Any, str], str]:
    """Make the check of a string's length."""

    def check(value: Any, field: str) -> str:
        if not isinstance(value, str) or not least <= len(value) <= most:
            raise InvalidField(field, f'must be a string of {least} to {most} characters')
        return value

    return check
