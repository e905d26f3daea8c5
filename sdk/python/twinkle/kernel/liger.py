"""Kernels of liger-kernel 0.8 on a CUDA device, adapted to the arguments of this library's operations.

The functions here are written for `liger_kernel.ops` 0.8.5. The gates overwrite their saved tensors with gradients, so
a graph supports only one backward pass, which is all that training needs.
"""

from liger_kernel.ops import LigerGELUMulFunction, LigerRMSNormFunction, LigerSiLUMulFunction
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
    """Return the normalized rows of `x`, computed in float32 and returned in its dtype, as the reference does."""
    # The in-place variant would overwrite a gradient that a residual connection still needs.
    return LigerRMSNormFunction.apply(x, weight, eps, offset, 'gemma', False)


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `silu(gate) * up`."""
    return LigerSiLUMulFunction.apply(gate, up)


def geglu(gate: Tensor, up: Tensor) -> Tensor:
    """Return `gelu(gate) * up`, in the tanh approximation."""
    return LigerGELUMulFunction.apply(gate, up)
