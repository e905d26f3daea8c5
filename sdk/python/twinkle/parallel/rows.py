"""Exchange of rows between ranks that each hold the same number of rows of a pass.

Megatron-core has the same functions, but they allocate their results on the current GPU, so they do not run on CPUs.
"""

from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


def own_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the rows of this rank."""
    return x.chunk(group.size())[group.rank()].contiguous()


def gathered_rows(x: Tensor, group: dist.ProcessGroup, *, is_gradient_partial: bool) -> Tensor:
    """Return the rows of all ranks.

    Args:
        x: rows of this rank.
        group: the ranks.
        is_gradient_partial: whether the gradient of the result is a part of a sum over the ranks, instead of being
            equal on all ranks.
    """
    return cast('Tensor', _GatheredRows.apply(x, group, is_gradient_partial))


def summed_rows(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return this rank's rows of the sum over all ranks."""
    return cast('Tensor', _SummedRows.apply(x, group))


class _GatheredRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup, is_gradient_partial: bool) -> Tensor:  # noqa: FBT001 - autograd functions take no keywords
        ctx.group, ctx.is_gradient_partial = group, is_gradient_partial
        return _gather(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grad_outputs
        return _sum(gradient, ctx.group) if ctx.is_gradient_partial else own_rows(gradient, ctx.group), None, None


class _SummedRows(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _sum(x, group)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None]:
        (gradient,) = grad_outputs
        return _gather(gradient, ctx.group), None


def _gather(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    whole = x.new_empty((x.shape[0] * group.size(), *x.shape[1:]))
    # Newer releases of torch deprecate the variant that writes into one tensor.
    dist.all_gather(list(whole.chunk(group.size())), x.contiguous(), group=group)
    return whole


def _sum(x: Tensor, group: dist.ProcessGroup) -> Tensor:
    own = torch.empty_like(own_rows(x, group))
    dist.reduce_scatter_tensor(own, x.contiguous(), group=group)
    return own
