"""Passing of hidden states between pipeline stages, forward and backward, for one pass at a time.

Every rank of a pipeline receives the hidden states of the last stage, so that all ranks compute equal losses. The
gradients return through the stages in the opposite direction.

The functions have an argument `anchor`, a tensor whose gradient is zero. A backward pass that computes its gradient
runs both functions in every stage, whether or not its layers have adapters.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function


class FromPreviousStage(Function):
    """Hidden states that the previous stage sends. The backward pass sends their gradient to it."""

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, like: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Return hidden states with the shape and the dtype of `like`."""
        ctx.group, ctx.anchor = group, anchor
        hidden = torch.empty_like(like)
        dist.recv(hidden, group_src=group.rank() - 1, group=group)
        return hidden

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = grad_outputs
        dist.send(gradient.contiguous(), group_dst=ctx.group.rank() - 1, group=ctx.group)
        return torch.zeros_like(ctx.anchor), None, None


class ToAllStages(Function):
    """Hidden states of the last stage on every rank of the pipeline."""

    @staticmethod
    def forward(ctx: Any, own: Tensor, anchor: Tensor, group: dist.ProcessGroup) -> Tensor:
        """Send this stage's hidden states to the next stage, and return the hidden states of the last stage."""
        ctx.group, ctx.anchor = group, anchor
        rank, last = group.rank(), group.size() - 1
        if rank < last:
            dist.send(own.contiguous(), group_dst=rank + 1, group=group)
        whole = own.clone() if rank == last else torch.empty_like(own)
        dist.broadcast(whole, group_src=last, group=group)
        return whole

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor, Tensor, None]:
        (gradient,) = grad_outputs
        rank, last = ctx.group.rank(), ctx.group.size() - 1
        if rank < last:
            gradient = torch.empty_like(gradient)
            dist.recv(gradient, group_src=rank + 1, group=ctx.group)
        return gradient, torch.zeros_like(ctx.anchor), None
