"""Linear layers and attention that Megatron-core's transformer layers are built from.

Each linear layer of the model stays a separate `LoraLinear` under its name in transformers, so that adapters are those
of `PackedCausalLM`. The modules here join the outputs of these layers in the layouts that Megatron-core expects.

Legend: S rows of this rank (all rows without sequence parallelism), T all rows, I inputs and O outputs of a layer, D
hidden size, A experts per token, Q query heads, K key-value heads, H head size.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, cast

import torch
from megatron.core import tensor_parallel
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer.spec_utils import ModuleSpec
from torch import Tensor, nn

from twinkle.nn.attention import SEQUENCES_ARGUMENT, packed_attention
from twinkle.nn.experts import PackedExperts
from twinkle.nn.gated_mlp import SiluGate
from twinkle.nn.sequences import PackedSequences
from twinkle.parallel.megatron.ranks import MegatronRanks
from twinkle.parallel.rows import gathered_rows, summed_rows

_mappings = cast('Any', tensor_parallel)


@dataclass
class Pack(PackedSeqParams):
    """Sequences of a pack, passed through Megatron-core's layers to `PackedAttention`."""

    sequences: PackedSequences | None = None


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
        """Return float [T, 1, O] for this rank's outputs, and None, because no bias is left to add."""
        x_T1I = all_rows(x_S1I, self._ranks)
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
        """Return float [S, 1, O], the sum over all ranks plus the bias, and None, because no bias is left to add."""
        y_S1O = sum_of_ranks(self.layer(x_T1I), self._ranks)
        return (y_S1O if self.bias is None else y_S1O + self.bias), None


class MixtureLayer(nn.Module):
    """Mixture of experts whose experts are divided among the ranks.

    Every rank chooses the experts of all rows and runs its own experts, so no rows are sent to other ranks.

    Args:
        router: router of transformers, equal on all ranks.
        experts: experts of this rank.
        ranks: groups of this rank.
    """

    def __init__(self, router: nn.Module, experts: PackedExperts, ranks: MegatronRanks) -> None:
        super().__init__()
        self.router, self.experts = router, experts
        self._ranks = ranks

    def forward(self, x_S1D: Tensor, **options: Any) -> tuple[Tensor, None]:
        """Return float [S, 1, D], and None, because no bias is left to add."""
        del options
        x_TD = all_rows(x_S1D, self._ranks)[:, 0]
        _, weights_TA, index_TA = self.router(x_TD)
        return sum_of_ranks(self.experts(x_TD, index_TA, weights_TA)[:, None], self._ranks), None


def all_rows(x_S1I: Tensor, ranks: MegatronRanks) -> Tensor:
    """Return float [T, 1, I], the rows of all ranks, whose gradients are added in the backward pass."""
    if ranks.is_sequence_parallel:
        return gathered_rows(x_S1I, ranks.tensor, is_gradient_partial=True)
    return _mappings.copy_to_tensor_model_parallel_region(x_S1I, group=ranks.tensor)


def sum_of_ranks(part_T1O: Tensor, ranks: MegatronRanks) -> Tensor:
    """Return float [S, 1, O], this rank's rows of the sum over all ranks."""
    if ranks.is_sequence_parallel:
        return summed_rows(part_T1O, ranks.tensor)
    return _mappings.reduce_from_tensor_model_parallel_region(part_T1O, group=ranks.tensor)


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

    Torch's silu rounds some elements differently for different numbers of rows or threads.
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


def given_class(module: nn.Module) -> type:
    """Return a class for Megatron-core that returns `module` instead of a new module."""

    class GivenModule:
        def __new__(cls, *arguments: Any, **options: Any) -> Any:
            del arguments, options
            return module

    return GivenModule
