"""Options of `map`, `filter`, `encode` and `check`, which are those of the library `datasets`."""

from collections.abc import Mapping
from typing import Any, TypedDict

from twinkle.dataset.errors import DatasetError
from twinkle.dataset.passes import is_stateful
from twinkle.infra import get_logger
from twinkle.preprocessor import FilterFunction, MapFunction


class ExecutionOptions(TypedDict, total=False):
    """Options of the methods that change rows. Options without effect on a kind of dataset are logged."""

    batched: bool
    """Whether functions receive columns; must be True for `map` and False for `filter`."""
    batch_size: int | None
    """Number of rows that a function or a tokenizer receives together. Default: 1000."""
    keep_in_memory: bool | None
    """Whether the results of rows from files stay in memory instead of files. Default: False."""
    load_from_cache_file: bool | None
    """Whether to use the stored results of an earlier call with the same rows and function. Default: True for rows from
    files, unless `datasets.disable_caching()` was called."""
    num_proc: int | None
    """Number of processes. Default: 1, without another process."""
    desc: str | None
    """Text of the progress bar."""


_SAME: Mapping[str, tuple[Any, ...]] = {
    'batch_size': (None,),
    'keep_in_memory': (None, True),
    'load_from_cache_file': (None, False),
    'num_proc': (None, 0, 1),
    'desc': (None,),
}
"""Values of each option that match the behavior of rows in memory, and are therefore not logged."""


def check_options(verb: str, options: Mapping[str, Any], *, is_batched: bool | None) -> None:
    """Refuse unknown options, and values that the method does not support.

    Args:
        verb: name of the method.
        options: the caller's options.
        is_batched: whether the method calls its function with columns of rows; None for methods without a function.

    Raises:
        TypeError: an option is unknown.
        ValueError: `num_proc` is negative, or `batch_size` is less than 1.
        DatasetError: `batched` differs from `is_batched`.
    """
    unknown = sorted(set(options) - set(ExecutionOptions.__annotations__))
    if unknown:
        raise TypeError(f'unknown arguments {unknown}; known are {sorted(ExecutionOptions.__annotations__)}')
    for name, least in {'num_proc': 0, 'batch_size': 1}.items():
        if options.get(name) is not None and options[name] < least:
            raise ValueError(f'{name} must be at least {least}, got {options[name]}')
    batched = options.get('batched', is_batched)
    if is_batched is not None and batched is not None and bool(batched) != is_batched:
        given = 'columns of rows (a mapping of lists)' if is_batched else 'one row at a time'
        raise DatasetError(f'batched={batched} is not supported: {verb}() passes {given}; omit batched')


def log_effectless(verb: str, options: Mapping[str, Any], reason: str, *, used: frozenset[str] = frozenset()) -> None:
    """Log the options that have no effect.

    Args:
        verb: name of the method.
        options: the caller's options.
        reason: why they have no effect.
        used: options that have an effect. Default: none.
    """
    for name in _SAME.keys() - used & options.keys():
        if options[name] not in _SAME[name]:
            get_logger().warning('%s(%s=%r) has no effect: %s', verb, name, options[name], reason)


def library_options(
    verb: str, options: ExecutionOptions, function: MapFunction | FilterFunction | None = None
) -> dict[str, Any]:
    """Return the arguments of the library's method.

    A function whose result depends on earlier rows, or that reports on all rows, runs in this process and is not
    cached.
    """
    given = {name: value for name, value in options.items() if value is not None and name != 'batched'}
    if given.get('num_proc') in (0, 1):
        del given['num_proc']  # the library would start one process
    if verb == 'filter':
        given.pop('batch_size', None)
    if function is None or not is_stateful(function):
        return given
    if given.pop('num_proc', None):
        name = type(function).__name__
        get_logger().warning('%s(num_proc=...) has no effect: %s needs all rows in order, or counts them', verb, name)
    return {**given, 'load_from_cache_file': False}
