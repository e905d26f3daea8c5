"""Liger's kernels (liger-kernel 0.8 on a CUDA device), with the arguments that ours take.

Written against `liger_kernel.ops` of version 0.8.5. Its gates write their gradients into what they saved, so one
backward pass of a graph is all there may be; the trainers make one.
"""

from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return the normed rows of `x`; all in float32 but the result, as the reference does."""
    # In place would write over a gradient that a residual connection still needs.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, 'gemma', False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) up`."""
    return LigerSiLUMulFunction.apply(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) up`, in the tanh approximation."""
    return LigerGELUMulFunction.apply(gate, up)
