"""Interface between a model and the sharding of its frozen weights among ranks, implemented in `twinkle.parallel`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class BaseSharding(Protocol):
    """Frozen weights of a model that are divided among ranks.

    A layer's weights are gathered from all ranks when a pass reaches the layer. All ranks must therefore run the same
    number of passes, and every backward pass must reach every layer.
    """

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the embedding and the output head are whole on every rank."""
        ...

    def running_pass(self) -> AbstractContextManager[None]:
        """Return a context for one pass, in which the embedding and the output head are whole.

        If gradients were recorded and no backward pass ran, the context ends with a backward pass with zero gradients,
        because other ranks wait for its collectives. After an exception, the context ends without a backward pass.
        """
        ...

    @property
    def pass_inputs(self) -> Sequence[Tensor]:
        """Inputs of the first layer in the running pass; empty if no gradients are recorded.

        A backward pass must compute their gradients, so that it reaches every layer.
        """
        ...

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a sharded parameter. Every rank must call it, in the same order."""
        ...
