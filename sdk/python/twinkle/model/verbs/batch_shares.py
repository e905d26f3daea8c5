"""Shares of a batch: each process of a program passes a share, and all processes train on the whole batch."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol, TypeVar

import numpy as np
from torch import Tensor

from twinkle.hub import HubError
from twinkle.infra import DeviceMesh
from twinkle.model.engine.joint_pass import LOSS_FAILURES
from twinkle.model.errors import TrainerError
from twinkle.parallel import all_gather, outcome_of, result_or_raise, run_on_rank

_Value = TypeVar('_Value')
_FAILURES = (*LOSS_FAILURES, TrainerError, HubError, OSError)
"""Exceptions of one process that all processes raise. Any other exception ends its process, and torchrun then ends the
others."""


class BatchShares(Protocol):
    """Exchange between the processes of a program. Every process must make the same calls; values are pickled."""

    def gather(self, call: str, make: Callable[[], Sequence[_Value]]) -> tuple[list[_Value], slice]:
        """Call `make` in every process, and join the values.

        Args:
            call: description of the call, equal in all processes.
            make: returns the values of this process.

        Returns:
            The values of all processes in the order of the ranks, each share once, and the slice of this process's
            share.

        Raises:
            CallsDiffer: another process made a different call.
            Exception: `make` raised it in a process; if it failed in several, the exception of the lowest rank.
        """
        ...

    def on_first(self, call: str, work: Callable[[], _Value]) -> _Value:
        """Call `work` in the first process only, and return its result in all processes.

        Raises:
            CallsDiffer: another process made a different call.
            Exception: `work` raised it.
        """
        ...


class SoloShares:
    """Batches of one process. Implements `BatchShares`."""

    def gather(self, call: str, make: Callable[[], Sequence[_Value]]) -> tuple[list[_Value], slice]:
        """Return the values of this process, and their slice in all values."""
        del call
        values = list(make())
        return values, slice(0, len(values))

    def on_first(self, call: str, work: Callable[[], _Value]) -> _Value:
        """Run `work`, and return its result."""
        del call
        return work()


class TorchShares:
    """Shares of all processes of a program. Implements `BatchShares`.

    Args:
        mesh: mesh of the processes. Processes that differ only in `tp`, `pp` and `ulysses` pass the same share, or only
            the first rank passes it.
    """

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh

    def gather(self, call: str, make: Callable[[], Sequence[_Value]]) -> tuple[list[_Value], slice]:
        """Return the values of all processes, each share once, and the slice with the values of this process.

        Raises:
            ValueError: processes that must pass the same share passed different shares.
        """
        outcomes = all_gather(call, outcome_of(lambda: list(make()), _FAILURES))
        values: list[list[_Value]] = [result_or_raise(outcome) for outcome in outcomes]
        self._check_copies(call, values)
        shares = [values[rank] for rank in self._mesh.get_reading_ranks()]
        own = self._mesh.data_rank
        begin = sum(map(len, shares[:own]))
        return [value for share in shares for value in share], slice(begin, begin + len(shares[own]))

    def _check_copies(self, call: str, values: Sequence[Sequence[Any]]) -> None:
        if self._mesh.world_size == self._mesh.data_world_size:
            return
        readers = self._mesh.get_reading_ranks()
        for rank, value in enumerate(values):
            reader = readers[self._mesh.get_data_rank_from_global_rank(rank)]
            if value and not _is_equal(value, values[reader]):
                raise ValueError(
                    f'ranks {reader} and {rank} {call} with different values; ranks that differ only in tp, pp and '
                    'ulysses must pass the same examples: use DataLoader, or the data_rank of the mesh'
                )

    def on_first(self, call: str, work: Callable[[], _Value]) -> _Value:
        """Run `work` in the first process, and return its result in all processes."""
        return run_on_rank(call, work, failures=_FAILURES)


def _is_equal(one: Any, other: Any) -> bool:
    """Return whether two values are equal, with arrays and tensors compared by their elements."""
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(_is_equal(value, other[key]) for key, value in one.items())
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(_is_equal, one, other))
    if isinstance(one, np.ndarray | Tensor) or isinstance(other, np.ndarray | Tensor):
        return np.array_equal(np.asarray(one), np.asarray(other))
    return bool(one == other)
