"""Exchange of Python objects between the processes of a program."""

import pickle
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch.distributed as dist

_Value = TypeVar('_Value')


class CallsDiffer(RuntimeError):
    """The processes made different calls, so their adapters may differ; restart the program."""


_differences: list[CallsDiffer] = []
"""The error of the first difference, which every later `all_gather` raises again."""


def all_gather(call: str, value: _Value, *, group: dist.ProcessGroup | None = None) -> list[_Value]:
    """Return the values of all ranks, in the order of the ranks. Every rank must call it; values are pickled.

    Args:
        call: description of the call, equal on all ranks.
        value: value of this rank.
        group: process group; None for all ranks of the program.

    Raises:
        CallsDiffer: another rank made a different call, for example after an exception that no other rank raised; or
            an earlier call differed.
        RuntimeError: a rank was lost.
    """
    if _differences:
        raise _differences[0]
    messages: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(messages, (call, value), group=group)
    calls = [message[0] for message in messages]
    if len(set(calls)) > 1:
        own, other = dist.get_rank(group), next(rank for rank, item in enumerate(calls) if item != call)
        error = CallsDiffer(
            f'the processes made different calls: rank {own} {call}, but rank {other} {calls[other]}; every process '
            'must make the same calls with the same options'
        )
        _differences.append(error)
        raise error
    return [message[1] for message in messages]


def agreed_errors(errors: Sequence[Exception | None], *, group: dist.ProcessGroup) -> list[Exception | None]:
    """Return each adapter's first error in rank order, or None. All ranks of a pass must call this function."""
    found = all_gather('calculated losses', list(errors), group=group)
    return [next((error for error in own if error is not None), None) for own in zip(*found, strict=True)]


def broadcast(value: _Value | None, *, group: dist.ProcessGroup, source: int = 0) -> _Value:
    """Return the value of one rank in all ranks. Every rank must call it; the value is pickled.

    Args:
        value: value of the rank `source`; ignored in other ranks.
        group: process group.
        source: number of the rank in the group.

    Raises:
        RuntimeError: a rank was lost.
    """
    values: list[Any] = [value]
    dist.broadcast_object_list(values, group_src=source, group=group)
    return values[0]


def run_on_rank(
    call: str,
    work: Callable[[], _Value],
    *,
    failures: tuple[type[Exception], ...],
    rank: int = 0,
    group: dist.ProcessGroup | None = None,
) -> _Value:
    """Call `work` on one rank only; return its result, or raise its exception, on all ranks.

    Args:
        call: description of the call, equal on all ranks.
        work: function of the rank; its result is pickled.
        failures: exceptions of `work` that all ranks raise. Any other exception ends its process.
        rank: number of the rank in the group.
        group: process group; None for all ranks of the program.

    Raises:
        CallsDiffer, RuntimeError: see `all_gather`.
        Exception: `work` raised one of `failures`.
    """
    outcome = outcome_of(work, failures) if dist.get_rank(group) == rank else None
    outcomes: list[Any] = all_gather(call, outcome, group=group)
    return result_or_raise(outcomes[rank])


def outcome_of(work: Callable[[], Any], failures: tuple[type[Exception], ...]) -> tuple[Any, Exception | None]:
    """Call `work`; return `(result, None)`, or `(None, error)` if it raised one of `failures`, made picklable."""
    try:
        return work(), None
    except failures as error:
        return None, _picklable(error)


def result_or_raise(outcome: tuple[Any, Exception | None]) -> Any:
    """Return the result of the call that `outcome_of` made, or raise its exception."""
    value, error = outcome
    if error is not None:
        raise error
    return value


def _picklable(error: Exception) -> Exception:
    """Return the exception, or a RuntimeError with its type and message if it cannot be pickled."""
    try:
        pickle.loads(pickle.dumps(error))  # noqa: S301 - own bytes
    except (pickle.PicklingError, TypeError, AttributeError):
        return RuntimeError(f'{type(error).__name__}: {error}')
    return error
