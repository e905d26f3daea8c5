"""Megatron-core's configuration of a model, and the models that are supported."""

from collections.abc import Mapping
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from twinkle.nn import UnsupportedModel
from twinkle.parallel.megatron.ranks import MegatronRanks

_MIXTURE = 'qwen3_moe'
_MODEL_TYPES = ('llama', 'mistral', 'qwen2', 'qwen3', _MIXTURE)
"""Values of `model_type` whose layers have the same structure, except for biases, norms of queries and keys, and
experts."""
_ROPE_TYPES = ('default', 'linear', 'llama3')
"""Rotary embeddings whose frequencies do not depend on the length of a sequence."""


def check_supported(config: PreTrainedConfig, *, tensor_size: int, pipeline_size: int) -> None:
    """Check that the layers of a model can be divided among ranks.

    Raises:
        UnsupportedModel: the architecture or one of its options is not supported, or a size does not divide the model.
    """
    problem = _problem_of(cast('Any', config))
    if problem is not None:
        raise UnsupportedModel(
            f'the Megatron backend supports the model types {", ".join(_MODEL_TYPES)}, and not {problem}; '
            'use TransformersModel'
        )
    sizes = {'num_attention_heads': config.num_attention_heads}
    mixtures = [is_mixture(config, index) for index in range(config.num_hidden_layers)]
    if not all(mixtures):
        sizes['intermediate_size'] = config.intermediate_size
    if any(mixtures):
        sizes['num_experts'] = config.num_experts
    if tensor_size % config.num_key_value_heads:
        # If the size is a multiple of the number of key-value heads, each rank has one whole head instead.
        sizes['num_key_value_heads'] = config.num_key_value_heads
    uneven = [f'{name} ({size})' for name, size in sizes.items() if size % tensor_size]
    if uneven:
        raise UnsupportedModel(f'tp_size {tensor_size} must divide {" and ".join(uneven)} of the model; change tp_size')
    if config.num_hidden_layers < pipeline_size:
        raise UnsupportedModel(
            f'pp_size {pipeline_size} is larger than the {config.num_hidden_layers} layers of the model; lower pp_size'
        )


def megatron_config(config: PreTrainedConfig, ranks: MegatronRanks, dtype: torch.dtype) -> TransformerConfig:
    """Return Megatron-core's configuration of the layers."""
    return TransformerConfig(
        num_layers=config.num_hidden_layers,
        hidden_size=config.hidden_size,
        num_attention_heads=config.num_attention_heads,
        # Each rank has at least one key-value head; ranks with the same head have equal copies.
        num_query_groups=max(config.num_key_value_heads, ranks.tensor.size()),
        kv_channels=head_size_of(config),
        ffn_hidden_size=config.intermediate_size,
        normalization='RMSNorm',
        layernorm_epsilon=config.rms_norm_eps,
        # `join_gate` computes the activation.
        gated_linear_unit=False,
        activation_func=_unchanged,
        add_bias_linear=False,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        # The weights are read from the model folder.
        perform_initialization=False,
        use_cpu_initialization=True,
        # Fused kernels of Megatron-core need CUDA, and their results differ bitwise from those of its plain kernels.
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        gradient_accumulation_fusion=False,
        tensor_model_parallel_size=ranks.tensor.size(),
        pipeline_model_parallel_size=ranks.pipeline.size(),
        # `ColumnLayers` and `RowLayer` divide the rows. With this option, Megatron-core would only change the random
        # state of its dropout, which is off.
        sequence_parallel=False,
        params_dtype=dtype,
        pipeline_dtype=dtype,
    )


def is_mixture(config: PreTrainedConfig, index: int) -> bool:
    """Return whether a decoder layer has a mixture of experts."""
    if config.model_type != _MIXTURE or index in (config.mlp_only_layers or ()):
        return False
    return config.num_experts > 0 and (index + 1) % config.decoder_sparse_step == 0


def head_size_of(config: PreTrainedConfig) -> int:
    """Return the number of channels of an attention head."""
    return getattr(config, 'head_dim', None) or config.hidden_size // config.num_attention_heads


def rope_frequencies(config: PreTrainedConfig, device: torch.device) -> Tensor:
    """Return float32 [H / 2], the angle per position of each pair of channels of a head of size H."""
    return LlamaRotaryEmbedding(cast('Any', config)).inv_freq.to(device)


def _unchanged(x: Tensor) -> Tensor:
    return x


def _problem_of(config: Any) -> str | None:
    """Return a description of the model that names its unsupported property, or None if it is supported."""
    if config.model_type not in _MODEL_TYPES:
        return repr(config.model_type)
    layer_types = getattr(config, 'layer_types', None) or ()
    is_windowed = config.model_type in ('mistral', _MIXTURE) and config.sliding_window is not None
    if is_windowed or any(kind != 'full_attention' for kind in layer_types):
        return f'{config.model_type} with sliding windows'
    if config.hidden_act != 'silu':
        return f'{config.model_type} with the activation {config.hidden_act!r}'
    parameters: Mapping[str, Any] = config.rope_parameters or {}
    rope_type = parameters.get('rope_type', 'default')
    if rope_type not in _ROPE_TYPES:
        return f'{config.model_type} with rotary embeddings of type {rope_type!r}'
    return None
