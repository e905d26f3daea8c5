"""Options of other dataset libraries that `map`, `filter`, `encode` and `check` accept for compatibility."""

from collections.abc import Mapping
from typing import Any, TypedDict

from twinkle.dataset.errors import DatasetError
from twinkle.infra import get_logger


class ExecutionHints(TypedDict, total=False):
    """Options of other dataset libraries; a value that differs from this library's behaviour is logged or refused."""

    batched: bool
    """Whether functions receive columns; must be True for `map` and False for `filter`."""
    batch_size: int | None
    """No effect."""
    keep_in_memory: bool | None
    """No effect."""
    load_from_cache_file: bool | None
    """No effect; results are never cached."""
    num_proc: int | None
    """No effect; rows are processed in this process."""
    desc: str | None
    """No effect; there is no progress bar."""


_EFFECTLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    'batch_size': ((None,), 'the number of rows processed together is fixed'),
    'keep_in_memory': ((None, True), 'the kind of dataset decides where rows are stored'),
    'load_from_cache_file': ((None, False), 'results are never cached'),
    'num_proc': ((None, 0, 1), 'rows are processed in this process'),
    'desc': ((None,), 'there is no progress bar'),
}
"""Values of each option that are not logged, and the reason why other values have no effect."""


def warn_unused_processes(name: str, count: int) -> None:
    """Log a warning if more than one process is requested.

    Args:
        name: name of the argument.
        count: requested number of processes.

    Raises:
        ValueError: `count` is less than 1.
    """
    if count < 1:
        raise ValueError(f'{name} must be at least 1, got {count}')
    if count > 1:
        get_logger().warning('%s=%d has no effect: packing runs in this process', name, count)


def check_hints(verb: str, hints: Mapping[str, Any], *, is_batched: bool | None) -> None:
    """Log options without effect, and refuse a value of `batched` that the method does not support.

    Args:
        verb: name of the method.
        hints: the caller's options.
        is_batched: whether the method calls its function with columns of rows; None for methods without a function.

    Raises:
        TypeError: an option is unknown.
        DatasetError: `batched` differs from `is_batched`.
    """
    unknown = sorted(set(hints) - set(ExecutionHints.__annotations__))
    if unknown:
        raise TypeError(f'unknown arguments {unknown}; known are {sorted(ExecutionHints.__annotations__)}')
    batched = hints.get('batched', is_batched)
    if is_batched is not None and batched is not None and bool(batched) != is_batched:
        given = 'columns of rows (a mapping of lists)' if is_batched else 'one row at a time'
        raise DatasetError(f'batched={batched} is not supported: {verb}() passes {given}; omit batched')
    for name, (accepted, reason) in _EFFECTLESS.items():
        if name in hints and hints[name] not in accepted:
            get_logger().warning('%s(%s=%r) has no effect: %s', verb, name, hints[name], reason)
