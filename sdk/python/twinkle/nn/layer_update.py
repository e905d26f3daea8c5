"""What a linear layer knows of an adapter: few verbs, so that kinds of weights can be added beside it.

A kind of weights is an `AdapterWeights`; at each layer that it changes it has a `LayerUpdate`.
LoRA is the kind of this room (`twinkle.nn.lora_weights`).

Legend: S rows of one adapter, I inputs and O outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twinkle.nn.dropout import RowDropout


@dataclass(frozen=True)
class LayerDraw:
    """The dropout of one adapter at one layer of one pass."""

    dropout: RowDropout
    layer: int

    def mask(self, x: Tensor) -> Tensor:
        """Return what to multiply `x` with; the same on every call."""
        return self.dropout.mask(x, layer=self.layer)


class LayerUpdate(Protocol):
    """What one adapter does at one linear layer, on its own rows. Autograd does not see inside."""

    saved_count: int
    """How many tensors `add_output` returns."""

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the tensors that gradients are wanted for, in a fixed order."""
        ...

    def add_output(self, x_SI: Tensor, y_SO: Tensor, draw: LayerDraw | None) -> tuple[Tensor, ...]:
        """Add the update to `y_SO` in place; return what `add_gradient` needs beside `x_SI`."""
        ...

    def add_gradient(
        self, x_SI: Tensor, dy_SO: Tensor, dx_SI: Tensor | None, saved: Sequence[Tensor], draw: LayerDraw | None
    ) -> tuple[Tensor | None, ...]:
        """Add the update's part to `dx_SI` in place, where one is wanted; return the gradients of `parameters`."""
        ...


class AdapterWeights(Protocol):
    """The weights of one adapter on one device."""

    def update_of(self, path: str) -> LayerUpdate | None:
        """Return what the adapter does at a layer, or nothing where it leaves the layer alone."""
        ...

    def draw_dropout(self) -> RowDropout | None:
        """Draw the dropout of one training pass, or nothing where the adapter has none."""
        ...
