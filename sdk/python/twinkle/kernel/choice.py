"""What may be said of an operation: a backend, several in order, or a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from twinkle.kernel.errors import KernelError
from twinkle.plugin import load_function

Kernel = Callable[..., Any]

BACKENDS = ('torch', 'liger')
"""Backends by name: the reference of this library, and liger-kernel on a CUDA device."""

OPERATIONS = ('geglu', 'rms_norm', 'swiglu')
"""Operations that can be given another kernel. Rotary embeddings, attention and experts cannot yet."""


@dataclass(frozen=True)
class KernelChoice:
    """Backends in order of preference; the first one that can run here is taken, and the log says which and why.

    Raises:
        KernelError: there is none, or one is unknown.
    """

    backends: tuple[str, ...]

    def __post_init__(self) -> None:
        """Check the names."""
        unknown = [backend for backend in self.backends if backend not in BACKENDS]
        if unknown or not self.backends:
            raise KernelError('KernelChoice', f'backends must be of {BACKENDS}, at least one, got {self.backends}')


DEFAULT_KERNEL_CONFIG: Mapping[str, KernelChoice] = MappingProxyType(
    {operation: KernelChoice(('liger', 'torch')) for operation in OPERATIONS}
)
"""Liger's kernels where they can run, the reference elsewhere."""


def hub(ref: str) -> Kernel:
    """Return a kernel that a plugin holds, such as `hub('hf://org/kernels:rms_norm')`; it runs the plugin's code.

    Args:
        ref: the plugin's id, a colon and the name of a function in it, which takes what the operation's kernels
            take (see `KernelSeam.operation`).

    Raises:
        KernelError: it is no such reference.
        PluginRefused: plugins are not allowed here, or it has no such function.
        HubError: the plugin cannot be had.
    """
    plugin, _, name = ref.rpartition(':')
    if not plugin or not name.isidentifier():
        raise KernelError(repr(ref), "write the plugin's id, a colon and a function, as 'hf://org/kernels:rms_norm'")
    return load_function(plugin, name)
