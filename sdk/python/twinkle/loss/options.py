"""Checks of the numbers a loss is configured with."""

import math


def check_number(name: str, value: float, *, low: float, high: float = math.inf, is_low_allowed: bool = True) -> float:
    """Return `value` as a float if it is finite and in [low, high], or in (low, high].

    Raises:
        ValueError: it is not; names the option.
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
        ValueError: it is not; names the option and the choices.
    """
    if value not in choices:
        raise ValueError(f'{name} must be one of {", ".join(choices)}, got {value!r}')
    return value
