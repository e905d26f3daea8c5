"""Compares two outcomes bitwise and locates the first difference."""

import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from twinkle.data_format import ForwardResult
from twinkle_services.kit.errors import DomainError
from twinkle_services.model.domain.result import OperationResult, Outcome

Array = npt.NDArray[Any]
_TIMES = ('seconds', 'per_second')
"""Name endings of metrics that measure time, which differ in every run."""


def first_difference(recorded: OperationResult | DomainError, found: OperationResult | DomainError) -> str | None:
    """Return the location of the first difference and both values; None if the outcomes are equal.

    Receipts, warnings and time metrics are ignored, because they do not describe the adapter. Errors are equal if their
    codes and reasons are equal. Values of a value head are compared only if they were recorded, because older
    journals lack them.
    """
    if isinstance(recorded, DomainError) or isinstance(found, DomainError):
        one, other = _kind(recorded), _kind(found)
        return None if one == other else f'outcome: recorded {one}, found {other}'
    return _difference('outcome', recorded.outcome, _as_recorded(recorded.outcome, found.outcome))


def _as_recorded(recorded: Outcome, found: Outcome) -> Outcome:
    """Return an outcome without the fields that an older recorded outcome lacks."""
    if isinstance(recorded, ForwardResult) and isinstance(found, ForwardResult) and not recorded.values:
        return replace(found, values=())
    return found


def _kind(outcome: OperationResult | DomainError) -> str:
    return f'{outcome.code.name} ({outcome.reason})' if isinstance(outcome, DomainError) else 'a result'


def _difference(path: str, one: Any, other: Any) -> str | None:
    parts = _parts(one, other)
    if parts is not None:
        pairs = ((f'{path}{name}', first, second) for name, first, second in parts)
        return next((text for name, first, second in pairs if (text := _difference(name, first, second))), None)
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return _array_difference(path, cast(Array, one), cast(Array, other))
    return None if _is_same(one, other) else f'{path}: recorded {one!r}, found {other!r}'


def _parts(one: Any, other: Any) -> list[tuple[str, Any, Any]] | None:
    """Return pairs of parts with their names; None if the two values are compared as units."""
    if is_dataclass(one) and type(one) is type(other):
        return [(f'.{item.name}', getattr(one, item.name), getattr(other, item.name)) for item in fields(one)]
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        first, second = cast(Mapping[str, Any], one), cast(Mapping[str, Any], other)
        if set(first) == set(second):
            return [(f'[{key!r}]', first[key], second[key]) for key in sorted(first) if not key.endswith(_TIMES)]
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        items, others = cast(Sequence[Any], one), cast(Sequence[Any], other)
        if len(items) == len(others):
            return [(f'[{index}]', items[index], others[index]) for index in range(len(items))]
    return None


def _array_difference(path: str, one: Array, other: Array) -> str | None:
    if one.dtype != other.dtype or one.shape != other.shape:
        return f'{path}: recorded {one.dtype} {one.shape}, found {other.dtype} {other.shape}'
    width = f'V{one.dtype.itemsize}'
    differs = np.ascontiguousarray(one).view(width).ravel() != np.ascontiguousarray(other).view(width).ravel()
    if not differs.any():
        return None
    index = int(np.argmax(differs))
    return f'{path}[{index}]: recorded {one.ravel()[index]!r}, found {other.ravel()[index]!r}'


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, float) and isinstance(other, float):
        # `==` would treat NaN as unequal to itself, and -0.0 as equal to 0.0.
        return struct.pack('<d', one) == struct.pack('<d', other)
    return type(one) is type(other) and bool(one == other)
