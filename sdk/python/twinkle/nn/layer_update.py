"""Interface between layers and adapters, implemented by each kind of trainable weights.

`AdapterWeights` is one adapter. Its implementations are `twinkle.nn.lora_weights` (LoRA), which has a `LayerUpdate` or
`ExpertUpdate` for each targeted layer, and `twinkle.nn.full_weights` (full parameters), which changes the weights of
the layers and has no updates.

Legend: S rows of one adapter, I inputs and O outputs of a layer.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from twinkle.nn.dropout import RowDropout


@dataclass(frozen=True)
class LayerDropout:
    """Dropout of one adapter at one layer of one pass."""

    dropout: RowDropout
    layer: int

    def mask(self, x: Tensor) -> Tensor:
        """Return the factors for `x`; every call returns the same mask."""
        return self.dropout.mask(x, layer=self.layer)


class LayerUpdate(Protocol):
    """Update of one adapter at one linear layer, applied to the adapter's rows. Autograd does not trace it."""

    saved_count: int
    """Number of tensors that `add_output` returns."""

    def parameters(self) -> tuple[Tensor, ...]:
        """Return the tensors that need gradients, in a fixed order."""
        ...

    def add_output(self, x_SI: Tensor, y_SO: Tensor, dropout: LayerDropout | None) -> tuple[Tensor, ...]:
        """Add the update to `y_SO` in place; return the tensors that `add_gradient` needs in addition to `x_SI`."""
        ...

    def add_gradient(
        self, x_SI: Tensor, dy_SO: Tensor, dx_SI: Tensor | None, saved: Sequence[Tensor], dropout: LayerDropout | None
    ) -> tuple[Tensor | None, ...]:
        """Add the update's gradient to `dx_SI` in place, if given; return the gradients of `parameters`."""
        ...


class ExpertUpdate(Protocol):
    """One adapter's update of the stacked expert weights of a mixture."""

    def parameters(self) -> Sequence[Tensor]:
        """Return the adapter's tensors."""
        ...

    def by_expert(self) -> Sequence[LayerUpdate]:
        """Return the update of each expert. Autograd adds their gradients to the gradients of the adapter."""
        ...


class AdapterWeights(Protocol):
    """Weights of one adapter on one device."""

    def update_of(self, path: str) -> LayerUpdate | None:
        """Return the adapter's update at a linear layer, or None if it does not change the layer."""
        ...

    def expert_update_of(self, path: str) -> ExpertUpdate | None:
        """Return the adapter's update of the stacked expert weights, or None if it does not change them."""
        ...

    def sample_dropout(self) -> RowDropout | None:
        """Sample the dropout of one training pass, or return None if the adapter has no dropout."""
        ...
