"""Construction of the decoder layers of one rank: its pipeline stage, and its part of each layer."""

import re
from collections.abc import Iterator
from functools import partial
from math import prod
from typing import Any, cast

import torch
from megatron.core.fusions import fused_bias_dropout
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_block import TransformerBlock, TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor, nn
from transformers import PreTrainedConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts, Qwen3MoeTopKRouter

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.experts import ExpertShare, PackedExperts
from twinkle.nn.layer_shard import LayerShard
from twinkle.nn.lora_linear import LoraLinear
from twinkle.nn.rms_norm import FusedRMSNorm
from twinkle.nn.rows import pad_rows
from twinkle.parallel.megatron.configuration import head_size_of, is_mixture, megatron_config
from twinkle.parallel.megatron.layers import (
    ColumnLayers,
    Given,
    MixtureLayer,
    PackedAttention,
    RowLayer,
    given,
    given_class,
    join_gate,
    join_heads,
)
from twinkle.parallel.megatron.layout import (
    ATTENTION_LAYERS,
    MLP_LAYERS,
    linear_shapes,
    padded_vocabulary,
    stage_layers,
)
from twinkle.parallel.megatron.ranks import MegatronRanks
from twinkle.parallel.megatron.sharding import Division
from twinkle.parallel.megatron.weights import FolderWeights

_add_residual = cast('Any', fused_bias_dropout).get_bias_dropout_add
_KEYS_OR_VALUES = re.compile(r'self_attn\.[kv]_proj')


class StageBuilder:
    """Builder of the layers of one rank from a model folder.

    Args:
        config: configuration of the model in transformers.
        weights: weights of the folder.
        ranks: groups of this rank.
        active: holder of the running pass's adapters, which the linear layers read.
    """

    def __init__(
        self, config: PreTrainedConfig, weights: FolderWeights, ranks: MegatronRanks, active: ActiveAdapters
    ) -> None:
        self._config: Any = config
        self._weights = weights
        self._ranks = ranks
        self.block_config = megatron_config(config, ranks, weights.dtype)
        """Configuration of the layers in Megatron-core."""
        self.active = active
        self.parameters: dict[str, nn.Parameter] = {}
        """This rank's parts of the weights that were built, by their names in transformers."""
        self.divided: dict[nn.Parameter, Division] = {}
        """Division of a weight among `tp` ranks; other weights are complete on every rank."""
        self.widths: set[int] = set()
        """Column counts of the matrix products of this rank."""
        self._numbers = {path: number for number, path in enumerate(linear_shapes(config))}

    def build(self) -> TransformerBlock:
        """Return the layers of this rank's stage, with the final norm in the last stage."""
        stage, is_last = self._ranks.pipeline.rank(), self._ranks.is_last_stage
        own = stage_layers(self._config.num_hidden_layers, stage, self._ranks.pipeline.size())
        # The last stage ends with the final norm, which the other stages must not have.
        norm = given(self.norm('model.norm.weight')) if is_last else None
        block = TransformerBlock(
            self.block_config,
            TransformerBlockSubmodules(
                layer_specs=[self._layer(index) for index in own],
                layer_norm=norm,
            ),
            pre_process=stage == 0,
            post_process=is_last,
            pg_collection=self._ranks.collection,
        )
        return block.eval().requires_grad_(requires_grad=False)

    @property
    def parameter_count(self) -> int:
        """Number of scalars of the whole model."""
        is_tied = self._config.tie_word_embeddings
        names = [name for name in self._weights.names if not (is_tied and name.startswith('lm_head.'))]
        return sum(prod(self._weights.shape(name)) for name in names)

    def norm(self, name: str) -> FusedRMSNorm:
        """Return a norm, which is not divided among the ranks."""
        source = nn.Module()
        source.weight = self._whole(name)
        return FusedRMSNorm(source, eps=self._config.rms_norm_eps, offset=0.0)

    def vocabulary(self, name: str) -> nn.Parameter:
        """Return this rank's rows of a weight with one row per token id, padded with zeros on the last rank."""
        if name in self.parameters:
            # The embedding and the head of some models are one weight.
            return self.parameters[name]
        count = self._ranks.tensor.size()
        size = padded_vocabulary(self._config.vocab_size, count) // count
        begin = size * self._ranks.tensor.rank()
        rows = self._weights.read(name, rows=slice(begin, min(begin + size, self._config.vocab_size)))
        return self._kept(name, pad_rows(rows, size), Division(axis=0, count=count))

    def _layer(self, index: int) -> ModuleSpec:
        path = f'model.layers.{index}'
        attention = SelfAttentionSubmodules(
            linear_qkv=partial(
                Given, module=self._columns(path, ATTENTION_LAYERS[:3], join_heads(head_size_of(self._config)))
            ),
            core_attention=partial(Given, module=PackedAttention(index)),
            linear_proj=given(self._row(path, ATTENTION_LAYERS[3])),
            **{key: given(norm) for key, norm in self._head_norms(path)},
        )
        submodules = TransformerLayerSubmodules(
            input_layernorm=given(self.norm(f'{path}.input_layernorm.weight')),
            self_attention=ModuleSpec(
                module=SelfAttention, params={'attn_mask_type': AttnMaskType.causal}, submodules=attention
            ),
            self_attn_bda=_add_residual,
            pre_mlp_layernorm=given(self.norm(f'{path}.post_attention_layernorm.weight')),
            mlp=self._mlp(path, has_experts=is_mixture(self._config, index)),
            mlp_bda=_add_residual,
        )
        return ModuleSpec(module=TransformerLayer, submodules=submodules)

    def _mlp(self, path: str, *, has_experts: bool) -> ModuleSpec | type:
        if has_experts:
            return given_class(self._mixture(f'{path}.mlp'))
        layers = MLPSubmodules(
            linear_fc1=given(self._columns(path, MLP_LAYERS[:2], join_gate)),
            linear_fc2=given(self._row(path, MLP_LAYERS[2])),
        )
        return ModuleSpec(module=MLP, submodules=layers)

    def _mixture(self, path: str) -> MixtureLayer:
        """Return a mixture with this rank's experts, stacked as in transformers."""
        with torch.device('meta'):
            router, experts = Qwen3MoeTopKRouter(self._config), Qwen3MoeExperts(self._config)
        router.weight = self._whole(f'{path}.gate.weight')
        self.widths.update(router.weight.shape)
        own = self._own_part(path, self._config.num_experts)
        share = ExpertShare(range(own.start, own.stop), self._config.num_experts)
        hidden, inner = self._config.hidden_size, self._config.moe_intermediate_size
        first = torch.empty(len(share.own), 2 * inner, hidden, dtype=self._weights.dtype, device=self._weights.device)
        down = first.new_empty(len(share.own), hidden, inner)
        for position, index in enumerate(share.own):
            expert = f'{path}.experts.{index}'
            first[position, :inner] = self._weights.read(f'{expert}.gate_proj.weight')
            first[position, inner:] = self._weights.read(f'{expert}.up_proj.weight')
            down[position] = self._weights.read(f'{expert}.down_proj.weight')
        division = Division(axis=0, count=self._ranks.tensor.size())
        experts.gate_up_proj = self._kept(f'{path}.experts.gate_up_proj', first, division)
        experts.down_proj = self._kept(f'{path}.experts.down_proj', down, division)
        packed = PackedExperts(experts, path=f'{path}.experts', active=self.active, share=share)
        return MixtureLayer(router, packed, self._ranks)

    def _head_norms(self, path: str) -> Iterator[tuple[str, FusedRMSNorm]]:
        """Yield the norms of queries and keys, under Megatron-core's names, if the model has them."""
        for key, name in (('q_layernorm', 'q_norm'), ('k_layernorm', 'k_norm')):
            weight = f'{path}.self_attn.{name}.weight'
            if weight in self._weights:
                yield key, self.norm(weight)

    def _columns(self, path: str, names: tuple[str, ...], join: Any) -> ColumnLayers:
        return ColumnLayers([self._linear(f'{path}.{name}', axis=0) for name in names], join, self._ranks)

    def _row(self, path: str, name: str) -> RowLayer:
        bias = f'{path}.{name}.bias'
        whole_bias = self._whole(bias) if bias in self._weights else None
        return RowLayer(self._linear(f'{path}.{name}', axis=1), whole_bias, self._ranks)

    def _linear(self, path: str, *, axis: int) -> LoraLinear:
        """Return this rank's part of a linear layer: some of its outputs (axis 0), or of its inputs (axis 1)."""
        weight = self._part(f'{path}.weight', axis=axis)
        self.widths.update(weight.shape)
        linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False, device='meta')
        linear.weight = weight
        bias = f'{path}.bias'
        if axis == 0 and bias in self._weights:
            linear.bias = self._part(bias, axis=0)
        shape = self._weights.shape(f'{path}.weight')
        shard = LayerShard(axis, self._own_part(path, shape[axis]), input_count=shape[1])
        return LoraLinear(linear, path=path, layer=self._numbers[path], active=self.active, shard=shard)

    def _part(self, name: str, *, axis: int) -> nn.Parameter:
        own = self._own_part(name, self._weights.shape(name)[axis])
        tensor = self._weights.read(name, **{'columns' if axis else 'rows': own})
        return self._kept(name, tensor, Division(axis, self._part_count(name)))

    def _whole(self, name: str) -> nn.Parameter:
        return self._kept(name, self._weights.read(name))

    def _kept(self, name: str, tensor: Tensor, division: Division | None = None) -> nn.Parameter:
        parameter = self.parameters[name] = nn.Parameter(tensor, requires_grad=False)
        if division is not None:
            self.divided[parameter] = division
        return parameter

    def _own_part(self, name: str, count: int) -> slice:
        """Return this rank's part of the rows or columns of a weight."""
        parts = self._part_count(name)
        index = self._ranks.tensor.rank() * parts // self._ranks.tensor.size()
        return slice(count * index // parts, count * (index + 1) // parts)

    def _part_count(self, name: str) -> int:
        """Return the number of different parts of a weight. With more ranks, several ranks have the same part."""
        size = self._ranks.tensor.size()
        return min(size, self._config.num_key_value_heads) if _KEYS_OR_VALUES.search(name) else size
