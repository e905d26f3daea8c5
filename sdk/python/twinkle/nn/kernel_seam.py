"""Where another kernel can take over a layer's arithmetic; which one does is `twinkle.kernel`'s to say."""

from abc import ABC, abstractmethod
from collections.abc import Callable

from torch import Tensor, nn


class KernelSeam(nn.Module, ABC):
    """A layer whose arithmetic is one operation with a name."""

    kernel: Callable[..., Tensor] | None = None
    """Runs in the place of the layer's own, with the same arguments. None: the layer's own, the reference."""

    @property
    @abstractmethod
    def operation(self) -> str:
        """Return its name: 'rms_norm' of `(x, weight, eps, offset)`, 'swiglu' or 'geglu' of `(gate, up)`."""
