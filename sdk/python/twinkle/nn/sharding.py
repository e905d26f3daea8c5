"""Interface between a model and its division among ranks, implemented in `twinkle.parallel`."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Protocol

from torch import Tensor, nn
from transformers import PreTrainedModel


class BaseSharding(Protocol):
    """Division of a model among ranks: each rank has a part of every layer, some layers, or some rows of each pass.

    If `needs_every_rank`, all ranks must run the same number of passes. Otherwise, the ranks that share one copy of the
    model must run the same passes. Every backward pass must reach every layer.
    """

    @property
    def needs_every_rank(self) -> bool:
        """Whether a rank without a pass must repeat the pass of another rank, because all ranks gather the weights."""
        ...

    def whole_weights(self) -> AbstractContextManager[None]:
        """Return a context in which the output head, and with FSDP all weights outside of layers, are gathered."""
        ...

    def running_pass(self) -> AbstractContextManager[None]:
        """Return a context for one pass, in which the output head is gathered.

        If other ranks wait for the collectives of a backward pass that did not run, the context ends with a backward
        pass with zero gradients. After an exception, the context ends without a backward pass.
        """
        ...

    @property
    def pass_inputs(self) -> Sequence[Tensor]:
        """Tensors whose gradients a backward pass must compute, so that it reaches every layer of this rank."""
        ...

    def gathered(self, parameter: Tensor) -> Tensor:
        """Return the full tensor of a sharded parameter. Every rank must call it, in the same order."""
        ...

    def agree(self, errors: Sequence[Exception | None]) -> list[Exception | None]:
        """Return the error of each adapter's loss, or None, equal on all ranks that run the pass.

        A custom loss can fail on one rank only. The ranks must agree before the backward pass: either all of them run
        it, or none.

        Args:
            errors: error of each adapter's loss on this rank, or None.
        """
        ...

    def complete(self, gradients: Sequence[tuple[str, Tensor]]) -> list[Tensor]:
        """Return the gradients of the whole layers. Every rank of a pass must call it, with gradients of equal shapes.

        Args:
            gradients: for each tensor of an adapter, the module path of its layer, and its gradient on this rank. The
                gradient may be this rank's part of a sum.
        """
        ...


class LoadSharding(BaseSharding, Protocol):
    """Division of a model before its weights are read, so that each rank reads only its shards."""

    def divide(self, model: PreTrainedModel) -> None:
        """Divide the parameters of a model without weights. Every rank must call it.

        Raises:
            UnsupportedModel: the model cannot be divided.
        """
        ...

    def whole_parts(self) -> Iterator[nn.Module]:
        """Yield the parts of the model, each with whole weights until the next part is requested.

        Every rank must read all parts. The last part is the backbone; by then, the weights of the earlier
        parts are divided again.
        """
        ...
