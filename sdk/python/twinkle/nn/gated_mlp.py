"""Gated feed-forward layers (Shazeer 2020, section 2) whose gate is one autograd node.

The gate uses only exp and tanh. Torch's silu and gelu round the scalar tail of a tensor differently from the
rest, and the position of that tail depends on the number of threads and rows.
"""

from collections.abc import Callable
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.distributed.tensor import DTensor
from torch.nn.functional import gelu, silu

from twinkle.nn.kernel_layer import KernelLayer

_GELU_SCALE = (2.0 / torch.pi) ** 0.5
_GELU_CUBIC = 0.044715
"""Coefficients of the tanh approximation (Hendrycks and Gimpel 2016, section 2)."""


class GatedMLP(KernelLayer):
    """`down(act(gate(x)) * up(x))`, with the replaced module's layers under their original names.

    Args:
        mlp: module to replace; its layers are shared.
        gate: autograd function that computes `act(g) * u`.
    """

    def __init__(self, mlp: nn.Module, gate: type['_Gate']) -> None:
        super().__init__()
        self.gate_proj = mlp.gate_proj
        self.up_proj = mlp.up_proj
        self.down_proj = mlp.down_proj
        self.gate = gate

    @property
    def operation(self) -> str:
        """Name of the gate: 'swiglu' or 'geglu'."""
        return self.gate.operation

    def forward(self, x: Tensor) -> Tensor:
        """Return `[..., D]` for `x [..., D]`, with hidden size D."""
        kernel = self.gate.apply if self.kernel is None else self.kernel
        return self.down_proj(kernel(self.gate_proj(x), self.up_proj(x)))


class _Gate(Function):
    """`act(g) * u`, with `act(g)` computed in float32 and the result in the dtype of `g`."""

    operation: ClassVar[str]
    """Name of the gate, the value of `KernelLayer.operation`."""

    activation: ClassVar[Callable[[Tensor], Tensor]]
    """Function that returns `act(g)`."""
    activation_and_slope: ClassVar[Callable[[Tensor], tuple[Tensor, Tensor]]]
    """Function that returns `act(g)` and its derivative; the caller may overwrite both."""

    @classmethod
    def forward(cls, ctx: Any, g: Tensor, u: Tensor) -> Tensor:
        ctx.save_for_backward(g, u)
        return cls.activation(g.float()).to(g.dtype).mul_(u)

    @classmethod
    def backward(cls, ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor]:
        g, u = ctx.saved_tensors
        activation, slope = cls.activation_and_slope(g.float())
        return slope.to(g.dtype).mul_(dy).mul_(u), activation.to(g.dtype).mul_(dy)


class SiluGate(_Gate):
    """`silu(g) * u`."""

    operation = 'swiglu'

    @staticmethod
    def activation(g: Tensor) -> Tensor:
        denominator = torch.neg(g).exp_().add_(1.0)
        return torch.div(g, denominator, out=denominator)

    @staticmethod
    def activation_and_slope(g: Tensor) -> tuple[Tensor, Tensor]:
        sigmoid = torch.neg(g).exp_().add_(1.0).reciprocal_()
        activation = g * sigmoid
        return activation, torch.addcmul(activation, activation, sigmoid, value=-1).add_(sigmoid)


class _GeluGate(_Gate):
    operation = 'geglu'

    @staticmethod
    def activation(g: Tensor) -> Tensor:
        return _gelu_tanh(g).add_(1.0).mul_(g).mul_(0.5)

    @staticmethod
    def activation_and_slope(g: Tensor) -> tuple[Tensor, Tensor]:
        tanh = _gelu_tanh(g)
        inner_slope = (g * g).mul_(3.0 * _GELU_CUBIC * _GELU_SCALE).add_(_GELU_SCALE)
        activation = (tanh + 1.0).mul_(g).mul_(0.5)
        slope = tanh.square().neg_().add_(1.0).mul_(inner_slope).mul_(g).add_(tanh).add_(1.0).mul_(0.5)
        return activation, slope


def _gelu_tanh(g: Tensor) -> Tensor:
    return (g * g).mul_(_GELU_CUBIC).add_(1.0).mul_(g).mul_(_GELU_SCALE).tanh_()


_GATES: tuple[tuple[Callable[[Tensor], Tensor], type[_Gate]], ...] = (
    (silu, SiluGate),
    (lambda g: gelu(g, approximate='tanh'), _GeluGate),
)
"""Activations, each with its fused gate."""


def gate_of(activation: Callable[[Tensor], Tensor]) -> type[_Gate] | None:
    """Return the fused gate of an activation, or None for an unknown activation."""
    probe = torch.linspace(-8.0, 8.0, 64)
    return next((gate for known, gate in _GATES if torch.allclose(known(probe), activation(probe))), None)


def fused_mlp(module: nn.Module) -> GatedMLP | None:
    """Return the fused form of a gated layer, if both compute the same function on sample rows.

    Returns:
        None for any other module, and for a layer whose weights are divided among ranks.
    """
    names = {name for name, _ in module.named_children()}
    if names != {'gate_proj', 'up_proj', 'down_proj', 'act_fn'}:
        return None
    gate, weight = gate_of(module.act_fn), module.gate_proj.weight
    if gate is None or isinstance(weight, DTensor):
        return None
    fused = GatedMLP(module, gate)
    rows = torch.randn(2, weight.shape[1], generator=torch.Generator().manual_seed(0)).to(weight)
    with torch.no_grad():
        # The largest value sets the tolerance, because sums over the inner width round differently.
        expected = module(rows)
        tolerance = 16 * torch.finfo(weight.dtype).eps * float(expected.abs().max())
        return fused if torch.allclose(fused(rows), expected, atol=tolerance, rtol=0.0) else None
