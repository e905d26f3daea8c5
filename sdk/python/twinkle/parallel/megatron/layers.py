"""Linear layers and attention that Megatron-core's transformer layers are built from.

Each linear layer of the model stays a separate `LoraLinear` under its name in transformers, so that adapters are those
of `PackedCausalLM`. The modules here join the outputs of these layers in the layouts that Megatron-core expects.

Legend: S rows of this rank (all rows without sequence parallelism), T all rows, I inputs and O outputs of a layer, Q
query heads, K key-value heads, H head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from twinkle.nn import SequenceSpan
from twinkle.nn.attention import SEQUENCES_ARGUMENT, packed_attention
from twinkle.nn.gated_mlp import SiluGate
from twinkle.parallel.megatron.ranks import MegatronRanks
from twinkle.parallel.rows import gathered_rows, summed_rows

_mappings = cast('Any', tensor_parallel)


@dataclass
class Pack(PackedSeqParams):
    """Sequences of a pack, passed through Megatron-core's layers to `PackedAttention`."""

    sequences: Sequence[SequenceSpan] = ()


class ColumnLayers(nn.Module):
    """Linear layers with the same inputs, whose outputs are divided among the ranks.

    Args:
        layers: this rank's part of each layer.
        join: returns the outputs of the layers as one tensor.
        ranks: groups of this rank.
    """

    def __init__(
        self, layers: Sequence[nn.Module], join: Callable[[Sequence[Tensor]], Tensor], ranks: MegatronRanks
    ) -> None:
        super().__init__()
        self.layers = nn.ModuleList(layers)
        self._join = join
        self._ranks = ranks

    def forward(self, x_S1I: Tensor) -> tuple[Tensor, None]:
        """Return float [T, 1, O] for this rank's outputs, and None for a bias that is not added yet."""
        group = self._ranks.tensor
        if self._ranks.is_sequence_parallel:
            x_T1I = gathered_rows(x_S1I, group, is_gradient_partial=True)
        else:
            x_T1I = _mappings.copy_to_tensor_model_parallel_region(x_S1I, group=group)
        return self._join([layer(x_T1I) for layer in self.layers]), None


class RowLayer(nn.Module):
    """Linear layer whose inputs are divided among the ranks.

    Args:
        layer: this rank's part of the layer, without a bias.
        bias: bias of the layer, equal on all ranks.
        ranks: groups of this rank.
    """

    def __init__(self, layer: nn.Module, bias: nn.Parameter | None, ranks: MegatronRanks) -> None:
        super().__init__()
        self.layer = layer
        self.bias = bias
        self._ranks = ranks

    def forward(self, x_T1I: Tensor) -> tuple[Tensor, None]:
        """Return float [S, 1, O], the sum over all ranks, and None for a bias that is not added yet."""
        group, part_T1O = self._ranks.tensor, self.layer(x_T1I)
        if self._ranks.is_sequence_parallel:
            y_S1O = summed_rows(part_T1O, group)
        else:
            y_S1O = _mappings.reduce_from_tensor_model_parallel_region(part_T1O, group=group)
        return (y_S1O if self.bias is None else y_S1O + self.bias), None


def join_heads(head_size: int) -> Callable[[Sequence[Tensor]], Tensor]:
    """Return a function that joins queries, keys and values, grouped by key-value head as Megatron-core expects."""

    def join(outputs: Sequence[Tensor]) -> Tensor:
        queries, keys, values = outputs
        group_count = keys.shape[-1] // head_size
        grouped = [part.view(*part.shape[:-1], group_count, -1) for part in (queries, keys, values)]
        return torch.cat(grouped, dim=-1).flatten(-2)

    return join


def join_gate(outputs: Sequence[Tensor]) -> Tensor:
    """Return the values multiplied by their gate, computed as in `PackedCausalLM`.

    Torch's silu would round some elements differently with another number of rows or threads.
    """
    gate, values = outputs
    return cast('Tensor', SiluGate.apply(gate, values))


class PackedAttention(nn.Module):
    """Attention within each sequence of a pack, on the heads of this rank.

    Args:
        layer_index: index of the layer in the model.
    """

    def __init__(self, layer_index: int) -> None:
        super().__init__()
        self.layer_idx = layer_index

    def forward(
        self,
        query_T1QH: Tensor,
        key_T1KH: Tensor,
        value_T1KH: Tensor,
        mask: None,
        *,
        packed_seq_params: Pack,
        **options: Any,
    ) -> Tensor:
        """Return float [T, 1, heads x H]."""
        del options
        rows = [tensor.permute(1, 2, 0, 3) for tensor in (query_T1QH, key_T1KH, value_T1KH)]
        arguments: dict[str, Any] = {SEQUENCES_ARGUMENT: packed_seq_params.sequences}
        output_1TQH, _ = packed_attention(self, rows[0], rows[1], rows[2], mask, **arguments)
        return output_1TQH.transpose(0, 1).flatten(-2)


class Given:
    """Class that returns an existing module instead of a new one. Other arguments of Megatron-core are ignored."""

    def __new__(cls, *arguments: Any, module: nn.Module, **options: Any) -> Any:
        """Return `module`."""
        del arguments, options
        return module


def given(module: nn.Module) -> ModuleSpec:
    """Return a specification for Megatron-core that builds nothing and uses `module`."""
    return ModuleSpec(module=Given, params={'module': module})
