"""Which kernels run the norms and gates of a model: the reference in torch, Liger's on a GPU, or one of your own.

The reference is what every other one is compared with, and what gives the same bits on every run. Kernels are
chosen for a model in this process; a service's are its operator's, and it offers none.
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
