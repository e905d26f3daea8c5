"""Selection of the kernels for a model's norms and gates: the torch reference, Liger on a GPU, or a custom function.

The reference is the implementation that other kernels are tested against, and its results are bitwise reproducible.
The selection applies to a model in this process. Services have no setting for kernels.
"""

from twinkle.kernel.choice import BACKENDS, DEFAULT_KERNEL_CONFIG, OPERATIONS, KernelChoice, hub
from twinkle.kernel.errors import KernelError
from twinkle.kernel.kernelize import kernelize, kernelized, kernels_of, unkernelize

__all__ = [
    'BACKENDS',
    'DEFAULT_KERNEL_CONFIG',
    'OPERATIONS',
    'KernelChoice',
    'KernelError',
    'hub',
    'kernelize',
    'kernelized',
    'kernels_of',
    'unkernelize',
]
