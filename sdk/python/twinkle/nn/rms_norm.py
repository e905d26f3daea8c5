"""Root mean square norms (Zhang and Sennrich 2019, equation 4) as one autograd node.

Models implement them as six operations, whose backward pass has three times the memory traffic of the forward pass.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor

from twinkle.nn.kernel_layer import KernelLayer

_ANY_WIDTH = 64
"""Width of the sample rows for norms without a weight."""


class FusedRMSNorm(KernelLayer):
    """`y = x / sqrt(mean(x^2) + eps) * (weight + offset)`, computed in float32 and returned in the dtype of `x`.

    Args:
        source: module with the `weight` [D] for rows of width D. It is read in each pass, because FSDP replaces the
            weights of the modules that it divides. None: a weight of 1 for any D.
        eps: added to the mean square.
        offset: 1 if the model stores the weight minus one, else 0.
    """

    def __init__(self, source: nn.Module | None, *, eps: float, offset: float) -> None:
        super().__init__()
        self.source: Any = source
        self._eps = eps
        self._offset = offset

    @property
    def operation(self) -> str:
        """Always 'rms_norm'."""
        return 'rms_norm'

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized rows of `x [..., D]`."""
        kernel = _RMSNorm.apply if self.kernel is None else self.kernel
        weight_D = x.new_ones(x.shape[-1]) if self.source is None else self.source.weight
        return kernel(x, weight_D, self._eps, self._offset)


class _RMSNorm(Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight_D: Tensor, eps: float, offset: float) -> Tensor:
        wide = x.float()
        size = x.shape[-1]
        inverse = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_().div_(size).add_(eps).rsqrt_()
        ctx.offset = offset
        ctx.save_for_backward(x, weight_D, inverse)
        return (wide * inverse).mul_(_scale(weight_D, offset)).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients: with g = dy * (weight + offset) and s the inverse root, dx = s g - x s^3 mean(g x)."""
        x, weight_D, inverse = ctx.saved_tensors
        x, dy, dtype = x.float(), dy.float(), x.dtype
        d_weight = None
        if ctx.needs_input_grad[1]:
            d_weight = (dy * x * inverse).flatten(0, -2).sum(dim=0).to(weight_D.dtype)
        if not ctx.needs_input_grad[0]:
            return None, d_weight, None, None
        g = dy * _scale(weight_D, ctx.offset)
        slope = (g * x).mean(dim=-1, keepdim=True).mul_(inverse).mul_(inverse).mul_(inverse)
        return g.mul_(inverse).addcmul_(x, slope, value=-1).to(dtype), d_weight, None, None


def _scale(weight_D: Tensor, offset: float) -> Tensor:
    return weight_D.float() + offset if offset else weight_D.float()


def fused_norm(module: nn.Module) -> FusedRMSNorm | None:
    """Return the fused form of a model's RMS norm, or None if the module is not an RMS norm, or its weight is divided.

    The class name only selects candidates; a comparison on random rows decides.
    """
    weight = getattr(module, 'weight', None)
    eps = getattr(module, 'variance_epsilon', getattr(module, 'eps', None))
    if not type(module).__name__.endswith('RMSNorm') or eps is None or not _has_only(module, weight):
        return None
    if isinstance(weight, DTensor):
        return None
    like = torch.empty(_ANY_WIDTH) if weight is None else weight
    probe = torch.randn(4, len(like), generator=torch.Generator().manual_seed(0)).to(like)
    for offset in (0.0, 1.0):
        fused = FusedRMSNorm(None if weight is None else module, eps=eps, offset=offset)
        with torch.no_grad():
            # Allow for a few more or fewer roundings in a 16-bit dtype.
            tolerance = 4 * torch.finfo(like.dtype).eps
            if torch.allclose(fused(probe), module(probe), atol=tolerance, rtol=tolerance):
                return fused
    return None


def _has_only(module: nn.Module, weight: Tensor | None) -> bool:
    """Return whether a module has no parameters, or only a one-dimensional weight."""
    return all(parameter is weight and parameter.dim() == 1 for parameter in module.parameters())
