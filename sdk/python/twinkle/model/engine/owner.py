"""Owner of an adapter: the rank of a group that alone holds the adapter's gradient and optimizer state.

All ranks have equal weights of the adapter, and equal parameter groups, schedules, counters and random states.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor

_Value = TypeVar('_Value')


class AdapterOwner(Protocol):
    """Rank that holds the gradient and the optimizer state of an adapter.

    Every rank of the group must make the same calls.
    """

    @property
    def rank(self) -> int:
        """Rank of the owner in the group."""
        ...

    @property
    def is_this_rank(self) -> bool:
        """Whether this process is the owner."""
        ...

    def run(self, call: str, work: Callable[[], _Value], *, updated: Sequence[Tensor] = ()) -> _Value:
        """Call `work` on the owner only; return its result, or raise its exception, on all ranks.

        Args:
            call: description of the call, equal on all ranks.
            work: function to run on the owner; its result is pickled.
            updated: tensors that `work` changes. The other ranks receive their contents, even after an exception.

        Raises:
            CallsDiffer: another rank made a different call.
            RuntimeError: a rank was lost.
            Exception: `work` raised it.
        """
        ...

    def broadcast(self, tensors: Sequence[Tensor]) -> None:
        """Overwrite the tensors of the other ranks with the owner's tensors; shapes and dtypes are equal on all ranks.

        Raises:
            RuntimeError: a rank was lost.
        """
        ...


def owned_tensors(owner: AdapterOwner, call: str, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """Return the owner's tensors on all ranks; other ranks receive copies on the CPU.

    Args:
        owner: rank that has the tensors.
        call: description of the call, equal on all ranks.
        tensors: tensors of the owner by name; ignored on other ranks.
    """
    layouts = owner.run(call, lambda: {name: (tuple(item.shape), item.dtype) for name, item in tensors.items()})
    if not owner.is_this_rank:
        tensors = {name: torch.empty(shape, dtype=dtype) for name, (shape, dtype) in layouts.items()}
    owner.broadcast(list(tensors.values()))
    return tensors
