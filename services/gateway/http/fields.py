"""Checks of single parameters. What is absent or null is left out; what would have no effect is refused by name."""

from collections.abc import Callable, Mapping
from typing import Any, cast

from services.kit.errors import InvalidField

Check = Callable[[Any, str], Any]
"""Takes a value and its path; returns it as it is meant, or raises InvalidField."""

_MAX_STRINGS = 64


def read_fields(values: Mapping[str, Any], checks: Mapping[str, Check], refused: Mapping[str, str]) -> dict[str, Any]:
    """Return the checked values of those parameters that are given.

    Args:
        values: the body.
        checks: what is known.
        refused: parameters of the API that are not served, and what is said of them.

    Raises:
        InvalidField: the first one that is wrong, unknown or not served.
    """
    found: dict[str, Any] = {}
    for name, value in values.items():
        if name not in checks and name not in refused:
            raise InvalidField(name[:100], 'is no parameter of this API')
        if value is None:
            continue
        if name in refused:
            raise InvalidField(name, refused[name])
        found[name] = checks[name](value, name)
    return found


def whole(least: int, most: int) -> Check:
    """Make the check of an integer."""

    def check(value: Any, field: str) -> int:
        if type(value) is not int or not least <= value <= most:
            raise InvalidField(field, f'must be an integer, {least} to {most}')
        return value

    return check


def number(least: float, most: float, *, is_least_excluded: bool = False) -> Check:
    """Make the check of a number."""

    def check(value: Any, field: str) -> float:
        # NaN is in no range; a whole number may be too large to be a float, which the comparison does not mind.
        is_number = type(value) in (int, float) and least <= value <= most
        if not is_number or (is_least_excluded and value == least):
            above = 'above' if is_least_excluded else 'at least'
            raise InvalidField(field, f'must be a number, {above} {least:g} and at most {most:g}')
        return float(value)

    return check


def flag(value: Any, field: str) -> bool:
    """Return a boolean."""
    if not isinstance(value, bool):
        raise InvalidField(field, 'must be true or false')
    return value


def text(value: Any, field: str) -> str:
    """Return a string."""
    if not isinstance(value, str):
        raise InvalidField(field, 'must be a string')
    return value


def items(value: Any, field: str) -> list[Any]:
    """Return a list."""
    if not isinstance(value, list):
        raise InvalidField(field, 'must be a list')
    return cast('list[Any]', value)


def mapping(value: Any, field: str) -> dict[str, Any]:
    """Return an object."""
    if not isinstance(value, dict):
        raise InvalidField(field, 'must be an object')
    return cast('dict[str, Any]', value)


def is_shallow(value: Any, depth: int) -> bool:
    """Whether objects and lists are nested `depth` times at most."""
    level: list[Any] = [value]
    for _ in range(depth):
        level = [child for parent in level for child in _children(parent)]
    return not any(map(_is_nest, level))


def stops(value: Any, field: str) -> list[str]:
    """Return stop strings: one, or a list of them."""
    if isinstance(value, str):
        return [_stop(value, field)]
    return [_stop(item, f'{field}[{place}]') for place, item in enumerate(_few(value, field))]


def token_ids(value: Any, field: str) -> list[int]:
    """Return a list of tokens."""
    check = whole(0, 2**31 - 1)
    return [check(item, f'{field}[{place}]') for place, item in enumerate(items(value, field))]


def stop_tokens(value: Any, field: str) -> list[int]:
    """Return a short list of tokens."""
    return token_ids(_few(value, field), field)


def only(allowed: Any, problem: str) -> Check:
    """Make the check of a parameter that may say one thing only, which is so anyway."""

    def check(value: Any, field: str) -> Any:
        if type(value) is not type(allowed) or value != allowed:
            raise InvalidField(field, problem)
        return value

    return check


def labels(value: Any, field: str) -> dict[str, Any]:
    """Return labels of the client's own."""
    for name, label in mapping(value, field).items():
        text(label, f'{field}.{name[:100]}')
    return value


def _stop(value: Any, field: str) -> str:
    if not 1 <= len(text(value, field)) <= 256:
        raise InvalidField(field, 'must have 1 to 256 characters')
    return value


def _is_nest(value: Any) -> bool:
    return isinstance(value, dict | list)


def _children(value: Any) -> list[Any]:
    if isinstance(value, dict):
        return list(cast('dict[str, Any]', value).values())
    return cast('list[Any]', value) if isinstance(value, list) else []


def _few(value: Any, field: str) -> list[Any]:
    if len(items(value, field)) > _MAX_STRINGS:
        raise InvalidField(field, f'must have at most {_MAX_STRINGS} entries')
    return value
