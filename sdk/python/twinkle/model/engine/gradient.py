"""Checks and accumulation of an adapter's gradient.

The gradient is stored as a sum with its divisor. Only the optimizer step divides it, so batches can still be added
after clipping or stepping.
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from twinkle.model.engine.adapter_state import AdapterState
from twinkle.model.engine.owner import AdapterOwner
from twinkle.model.errors import LossNotFinite


def sum_gradients(first: Sequence[Tensor] | None, second: Sequence[Tensor] | None) -> Sequence[Tensor] | None:
    """Return the sum of two gradients; None counts as zero."""
    if first is None or second is None:
        return second if first is None else first
    return [a + b for a, b in zip(first, second, strict=True)]


class GradientSum:
    """The sum of the gradients of a batch's parts.

    The gradients are added in pairs of neighbours, then the sums of these pairs, and so on. If the number of sums is
    odd, the last sum is added later. This binary tree depends only on the number of parts, so several processes can
    each add complete subtrees and still compute bitwise the same sum. Memory: up to `log2(parts) + 1` gradients.

    Args:
        is_folded: whether the gradients are added one after the other instead, with memory for one gradient.
    """

    def __init__(self, *, is_folded: bool = False) -> None:
        self._is_folded = is_folded
        self._subtrees: list[tuple[int, Sequence[Tensor] | None]] = []
        """Number of parts and sum of each complete subtree, from the first part to the last."""

    def add(self, gradient: Sequence[Tensor] | None) -> None:
        """Add the gradient of the next part; None for a part without a gradient."""
        size = 1
        while self._subtrees and (self._is_folded or self._subtrees[-1][0] == size):
            left_size, left = self._subtrees.pop()
            gradient, size = sum_gradients(left, gradient), left_size + size
        self._subtrees.append((size, gradient))

    def total(self) -> Sequence[Tensor] | None:
        """Return the sum of all parts; None if no part has a gradient."""
        total: Sequence[Tensor] | None = None
        for _, subtree in reversed(self._subtrees):
            total = sum_gradients(subtree, total)
        return total


def check_gradient(state: AdapterState, gradient: Sequence[Tensor]) -> None:
    """Refuse a gradient that would make the adapter's weights invalid.

    Raises:
        LossNotFinite: an element is infinite or NaN.
    """
    # The largest magnitude is finite if and only if all elements are; this needs one transfer from the device.
    largest = torch.nn.utils.get_total_norm(gradient, norm_type=math.inf)
    if isinstance(largest, DTensor):
        # Every rank must use the largest element of all shards.
        largest = largest.full_tensor()
    if not bool(largest.isfinite()):
        raise LossNotFinite(state.adapter_id, None)


def total_gradient(state: AdapterState, gradient: Sequence[Tensor], *, is_finite: bool = False) -> list[Tensor]:
    """Return the sum of the accumulated gradient and a batch's gradient; `accumulate` stores the sum.

    Args:
        state: state of the adapter; not modified.
        gradient: gradient of the batch, in the order of the parameters; not aliased.
        is_finite: whether the gradient of the batch is known to be finite.

    Raises:
        LossNotFinite: the sum is not finite.
    """
    totals = [
        tensor.clone() if parameter.grad is None else parameter.grad + tensor
        for parameter, tensor in zip(state.parameters(), gradient, strict=True)
    ]
    if state.batch_count or not is_finite:
        check_gradient(state, totals)
    return totals


def total_on_owner(
    owner: AdapterOwner, state: AdapterState, gradient: Sequence[Tensor] | None, *, is_finite: bool = False
) -> list[Tensor] | None:
    """Return the `total_gradient` on the owner, and None on the other ranks; every rank must call it.

    Raises:
        LossNotFinite: the sum is not finite; all ranks raise it.
    """
    totals: list[Tensor] = []

    def add() -> None:
        totals.extend(total_gradient(state, gradient or (), is_finite=is_finite))

    if state.batch_count or not is_finite:
        owner.run(f'added a gradient to {state.adapter_id}', add)
    elif owner.is_this_rank:
        add()
    return totals if owner.is_this_rank else None


def accumulate(state: AdapterState, totals: Sequence[Tensor] | None, *, divisor: int) -> None:
    """Count a batch, and store its `total_gradient` on the ranks that hold the adapter's gradient.

    Args:
        state: state of the adapter.
        totals: sum of the gradients; None on ranks that do not hold it.
        divisor: contribution of the batch to the divisor of the sum.
    """
    if totals is not None:
        for parameter, total in zip(state.parameters(), totals, strict=True):
            parameter.grad = total
    state.batch_count += 1
    state.divisor += divisor
