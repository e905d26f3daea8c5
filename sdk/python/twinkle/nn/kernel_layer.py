"""Extension point at which an external kernel replaces a layer's arithmetic; `twinkle.kernel` selects the kernel."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class KernelLayer(nn.Module, ABC):
    """Layer whose arithmetic is one named operation."""

    kernel: Callable[..., Tensor] | None = None
    """Replacement called with the operation's arguments; None uses the layer's own reference implementation."""

    @property
    @abstractmethod
    def operation(self) -> str:
        """Name of the operation: 'rms_norm' of `(x, weight, eps, offset)`, 'swiglu' or 'geglu' of `(gate, up)`."""
