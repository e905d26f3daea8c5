"""Interface between a model and the sharding of its frozen weights among ranks, implemented in `twinkle.parallel`."""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor


class BaseSharding(Protocol):
    """Frozen weights of a model that are divided among ranks, which run passes together.

    These ranks must run the same number of passes, and every backward pass must reach every layer.
    """

    @property
    def needs_every_rank(self) -> bool:
        """Whether ranks without a pass of a round must run one too, because all ranks gather the weights together."""
        ...

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

    def complete(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the gradients of the whole layers. Every rank of a pass must call it, with gradients of equal shapes.

        Args:
            gradients: module path of each layer with an adapter, and the gradient of one of its tensors, which may be
                this rank's part of a sum.
        """
        ...
