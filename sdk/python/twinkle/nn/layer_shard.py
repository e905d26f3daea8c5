"""Share of a linear layer that one rank holds, and the matching slices of adapters, which are complete on every rank.

Legend: S rows of one adapter, I inputs and O outputs of the whole layer.
"""

from dataclasses import dataclass, replace

from torch import Tensor

from twinkle.nn.active_adapters import LayerSpan
from twinkle.nn.errors import UnsupportedModel
from twinkle.nn.layer_update import LayerDropout
from twinkle.nn.lora_factors import LoraFactors


@dataclass(frozen=True)
class LayerShard:
    """Outputs (rows of the weight) or inputs (columns of the weight) of a linear layer that a rank holds.

    The results of all shards are concatenated if they have different outputs, and added if they have different inputs.
    Either way, the gradient of an adapter is the sum of the gradients of all shards.
    """

    axis: int
    """0 if the rank holds some of the outputs, 1 if it holds some of the inputs."""
    part: slice
    """Outputs or inputs that this rank holds."""
    input_count: int
    """I: number of inputs of the whole layer. Dropout is sampled for all inputs."""

    def span(self, span: LayerSpan) -> LayerSpan:
        """Return the span with the slices of its adapter that this rank's part of the layer needs.

        Raises:
            UnsupportedModel: the adapter is not a LoRA adapter.
        """
        whole = span.update
        if not isinstance(whole, LoraFactors):
            raise UnsupportedModel('layers that several ranks share support only LoRA adapters')
        if self.axis == 0:
            return replace(span, update=replace(whole, b=whole.b[self.part]))
        dropout = span.dropout
        if dropout is not None:
            dropout = _ShardDropout(dropout.dropout, dropout.layer, self)
        return replace(span, update=replace(whole, a=whole.a[:, self.part]), dropout=dropout)


@dataclass(frozen=True)
class _ShardDropout(LayerDropout):
    """Dropout whose masks are this rank's columns of the masks of the whole layer."""

    shard: LayerShard

    def mask(self, x: Tensor) -> Tensor:
        """Return the factors for `x`, the inputs of this rank."""
        whole_SI = super().mask(x.new_empty((x.shape[0], self.shard.input_count)))
        return whole_SI[:, self.shard.part]
