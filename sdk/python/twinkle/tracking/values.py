"""Checks of names, steps and numbers before they reach a backend."""

import operator
import re
from collections.abc import Mapping
from typing import Any, SupportsIndex

NAME = re.compile(r'[A-Za-z0-9][\w.:-]*(/[\w:-][\w.:-]*)*', re.ASCII)
"""Names that every backend stores unchanged."""
NAME_LENGTH = 128
RESERVED = frozenset({'metrics', 'project', 'run', 'step', 'time', 'timestamp'})
"""Names that a backend uses for its columns."""
LARGEST_STEP = 2**53 - 1


def checked_name(field: str, name: Any) -> str:
    """Check the name of a metric or an option, and return it.

    Raises:
        TypeError: The name is not a string.
        ValueError: A backend could not store the name.
    """
    if not isinstance(name, str):
        raise TypeError(f'{field}: names must be strings, got {name!r}')
    if len(name) > NAME_LENGTH or not NAME.fullmatch(name):
        raise ValueError(
            f'{field}: {name!r} is not a valid name; use up to {NAME_LENGTH} letters, digits and _ - . : with / between'
            ' parts, and begin with a letter or digit'
        )
    return name


def checked_step(step: SupportsIndex) -> int:
    """Return the step as an integer.

    Raises:
        TypeError: The step is not an integer.
        ValueError: The step is negative or larger than 2^53 - 1.
    """
    number = operator.index(step)
    if not 0 <= number <= LARGEST_STEP:
        raise ValueError(f'step: must be from 0 to 2^53 - 1, got {number}')
    return number


def checked_values(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the numbers by name.

    Raises:
        TypeError: A name is not a string, or a value is not a number.
        ValueError: A name is invalid.
    """
    for name in values:
        if checked_name('values', name) in RESERVED:
            raise ValueError(f'values: the name {name!r} is reserved; choose another name, such as train/{name}')
    return {name: number_of(name, value) for name, value in values.items()}


def number_of(name: str, value: Any) -> float:
    """Return a Python, NumPy or torch number as a float.

    Args:
        name: Name for the error message.
        value: Number, or an array or tensor with one element. The tensor may require a gradient.

    Raises:
        TypeError: The value is not a number.
    """
    problem = f'values[{name!r}]: expected a number, got {type(value).__name__}'
    if isinstance(value, str | bytes | bytearray):
        raise TypeError(problem)
    # torch warns when a tensor that requires a gradient is converted.
    detach = getattr(value, 'detach', None)
    try:
        return float(value if detach is None else detach())
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:
        raise TypeError(problem) from error
