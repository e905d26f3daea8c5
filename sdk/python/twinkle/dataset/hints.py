"""Options that programs give to the verbs of other dataset libraries, and what becomes of them here."""

from collections.abc import Mapping
from typing import Any, TypedDict

from twinkle.dataset.errors import DatasetError
from twinkle.infra import get_logger


class ExecutionHints(TypedDict, total=False):
    """Options of other dataset libraries: taken where they say what is so anyway, told of where they have no effect."""

    batched: bool
    batch_size: int | None
    keep_in_memory: bool | None
    load_from_cache_file: bool | None
    num_proc: int | None
    desc: str | None


_EFFECTLESS: dict[str, tuple[tuple[Any, ...], str]] = {
    'batch_size': ((None,), 'how many rows are worked on together is chosen here'),
    'keep_in_memory': ((None, True), 'rows are kept where they are'),
    'load_from_cache_file': ((None, False), 'nothing is cached, so nothing is read from a cache'),
    'num_proc': ((None, 0, 1), 'rows are worked on in this process'),
    'desc': ((None,), 'there is no progress bar'),
}
"""What each option may say without a word, being so, and why it has no effect otherwise."""


def tell_of_processes(name: str, count: int) -> None:
    """Log that so many processes are not used.

    Raises:
        ValueError: it is no number of processes.
    """
    if count < 1:
        raise ValueError(f'{name} must be at least 1, got {count}')
    if count > 1:
        get_logger().warning('%s=%d has no effect: packing is one quick pass in this process', name, count)


def check_hints(verb: str, hints: Mapping[str, Any], *, is_batched: bool | None) -> None:
    """Log the options of a verb that have no effect, and refuse those that would change what a function is given.

    Args:
        verb: its name.
        hints: as they came.
        is_batched: whether the verb's function is given columns of rows; None where there is no function.

    Raises:
        TypeError: an option is unknown.
        DatasetError: `batched` says otherwise than it is.
    """
    unknown = sorted(set(hints) - set(ExecutionHints.__annotations__))
    if unknown:
        raise TypeError(f'unknown arguments {unknown}')
    batched = hints.get('batched', is_batched)
    if is_batched is not None and batched is not None and bool(batched) != is_batched:
        given = 'columns of rows (a mapping of lists)' if is_batched else 'one row at a time'
        raise DatasetError(f'batched={batched}: {verb}() gives its function {given}; write it so, or leave batched out')
    for name, (silent, why) in _EFFECTLESS.items():
        if name in hints and hints[name] not in silent:
            get_logger().warning('%s(%s=%r) has no effect: %s', verb, name, hints[name], why)
