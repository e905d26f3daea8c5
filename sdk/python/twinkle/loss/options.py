"""Validation of loss options."""

import math


def check_number(name: str, value: float, *, low: float, high: float = math.inf, is_low_allowed: bool = True) -> float:
    """Return `value` as a float if it is finite and in [low, high]; `low` itself is valid only if `is_low_allowed`.

    Raises:
        ValueError: the value is invalid; the message names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ValueError(f'{name} must be a number, got {value!r}')
    if math.isfinite(value) and (low < value or (is_low_allowed and low == value)) and value <= high:
        return float(value)
    bound = f'{"at least" if is_low_allowed else "above"} {low:g}' + ('' if high == math.inf else f', at most {high:g}')
    raise ValueError(f'{name} must be {bound}, got {value}')


def check_choice(name: str, value: str, choices: tuple[str, ...]) -> str:
    """Return `value` if it is one of `choices`.

    Raises:
        ValueError: the value is invalid; the message names the option and the choices.
    """
    if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(choices)}, got {value!r}')
    return value


def check_whole(name: str, value: float, *, low: float = -math.inf, high: float = math.inf) -> int:
    """Return `value` as an integer if it is whole and in [low, high].

    Raises:
        ValueError: the value is invalid; the message names the option.
    """
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f'{name} must be a whole number, got {value!r}')
    if value != int(value) or not low <= value <= high:
        minimum = '' if low == -math.inf else f', at least {low:g}'
        maximum = '' if high == math.inf else f', at most {high:g}'
        raise ValueError(f'{name} must be a whole number{minimum}{maximum}, got {value!r}')
    return int(value)


def check_flag(name: str, value: bool) -> bool:  # noqa: FBT001 - the value to validate
    """Return `value` if it is True or False.

    Raises:
        ValueError: the value is invalid; the message names the option.
    """
    if not isinstance(value, bool):
        raise ValueError(f'{name} must be true or false, got {value!r}')
    return value
