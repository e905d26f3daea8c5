"""Ways to name the kernel of an operation: a backend, several backends in order, or a function."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from twinkle.kernel.errors import KernelError
from twinkle.plugin import load_function

Kernel = Callable[..., Any]

BACKENDS = ('torch', 'liger')
"""Backend names: this library's reference implementation in torch, and liger-kernel on a CUDA device."""

OPERATIONS = ('geglu', 'rms_norm', 'swiglu')
"""Operations whose kernel can be replaced. Rotary embeddings, attention and experts are not supported."""


@dataclass(frozen=True)
class KernelChoice:
    """Backends in order of preference; the first backend that can run is used and logged.

    Raises:
        KernelError: the list is empty, or a backend is unknown.
    """

    backends: tuple[str, ...]

    def __post_init__(self) -> None:
        unknown = [backend for backend in self.backends if backend not in BACKENDS]
        if unknown or not self.backends:
            raise KernelError('KernelChoice', f'give at least one backend of {BACKENDS}, got {self.backends}')


DEFAULT_KERNEL_CONFIG: Mapping[str, KernelChoice] = MappingProxyType(
    {operation: KernelChoice(('liger', 'torch')) for operation in OPERATIONS}
)
"""Liger's kernels where they can run, otherwise the reference."""


def hub(ref: str) -> Kernel:
    """Load a kernel from a plugin, such as `hub('hf://org/kernels:rms_norm')`; this runs the plugin's code.

    Args:
        ref: plugin id, a colon, and the name of a function that takes the operation's arguments
            (see `KernelLayer.operation`).

    Raises:
        KernelError: the reference is malformed.
        PluginRefused: see `twinkle.plugin.load_function`.
        HubError: the plugin cannot be downloaded.
    """
    plugin, _, name = ref.rpartition(':')
    if not plugin or not name.isidentifier():
        raise KernelError(
            repr(ref), "give a plugin id, a colon and a function name, such as 'hf://org/kernels:rms_norm'"
        )
    return load_function(plugin, name)
