"""Models, options and sizes that Megatron-core cannot run are refused before weights are read."""

from typing import Any

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from twinkle.nn import PackedCausalLM, UnsupportedModel
from twinkle.parallel.megatron.configuration import check_supported
from twinkle.parallel.megatron.layout import expert_shapes, linear_shapes, stage_layers

SIZES = {'num_attention_heads': 8, 'num_key_value_heads': 4, 'intermediate_size': 64, 'num_hidden_layers': 4}


def _check(model_type: str, tensor_size: int = 1, pipeline_size: int = 1, **options: Any) -> None:
    config = AutoConfig.for_model(model_type, hidden_size=32, vocab_size=100, **{**SIZES, **options})
    check_supported(config, tensor_size=tensor_size, pipeline_size=pipeline_size)


@pytest.mark.parametrize('model_type', ['llama', 'mistral', 'qwen2', 'qwen3', 'qwen3_moe'])
@pytest.mark.parametrize('sizes', [(1, 1), (2, 4), (8, 1)])
def test_supported_models_are_accepted(model_type: str, sizes: tuple[int, int]) -> None:
    """More ranks than key-value heads, and sizes that do not divide the vocabulary, are accepted."""
    _check(model_type, *sizes, **({'sliding_window': None} if model_type == 'mistral' else {}))


@pytest.mark.parametrize(
    ('model_type', 'sizes', 'options', 'message'),
    [
        ('gemma2', (1, 1), {}, "not 'gemma2'; use TransformersModel"),
        ('qwen2_moe', (1, 1), {}, "not 'qwen2_moe'"),
        ('qwen3_moe', (4, 1), {'num_experts': 6}, r'tp_size 4 must divide num_experts \(6\)'),
        ('qwen3_moe', (1, 1), {'use_sliding_window': True, 'sliding_window': 16}, 'sliding windows'),
        ('mistral', (1, 1), {'sliding_window': 16}, 'mistral with sliding windows'),
        (
            'qwen2',
            (1, 1),
            {'use_sliding_window': True, 'sliding_window': 16, 'max_window_layers': 2},
            'sliding windows',
        ),
        ('llama', (1, 1), {'hidden_act': 'gelu'}, "the activation 'gelu'"),
        ('llama', (1, 1), {'rope_parameters': {'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 1e4}}, "'dynamic'"),
        ('llama', (3, 1), {}, r'tp_size 3 must divide num_attention_heads \(8\) and intermediate_size \(64\)'),
        ('llama', (16, 1), {'num_attention_heads': 16, 'num_key_value_heads': 3}, r'num_key_value_heads \(3\)'),
        ('llama', (1, 5), {}, 'pp_size 5 is larger than the 4 layers'),
    ],
)
def test_other_models_and_sizes_are_refused(
    model_type: str, sizes: tuple[int, int], options: dict[str, Any], message: str
) -> None:
    """The error for another model or an unsuitable size names the option or the size."""
    with pytest.raises(UnsupportedModel, match=message):
        _check(model_type, *sizes, **options)


@pytest.mark.parametrize(('layer_count', 'stage_count'), [(4, 1), (4, 4), (30, 4), (7, 3)])
def test_stages_divide_all_layers(layer_count: int, stage_count: int) -> None:
    """Consecutive stages contain all layers once, and their sizes differ by at most one."""
    stages = [stage_layers(layer_count, stage, stage_count) for stage in range(stage_count)]
    assert [index for stage in stages for index in stage] == list(range(layer_count))
    assert max(map(len, stages)) - min(map(len, stages)) <= 1


@pytest.mark.parametrize('model_type', ['qwen3', 'qwen3_moe'])
def test_layers_are_those_of_transformers(model_type: str) -> None:
    """Layers have the paths, shapes and order of transformers, because their numbers select dropout masks.

    The mixture of experts has layers with and without experts.
    """
    more = {'moe_intermediate_size': 16, 'num_experts': 4, 'num_experts_per_tok': 2, 'decoder_sparse_step': 2}
    options = {**SIZES, 'num_hidden_layers': 4, **(more if model_type == 'qwen3_moe' else {})}
    config = AutoConfig.for_model(model_type, hidden_size=32, vocab_size=100, head_dim=8, **options)
    packed = PackedCausalLM(AutoModelForCausalLM.from_config(config))
    assert list(linear_shapes(config).items()) == list(packed.layers.items())
    assert expert_shapes(config) == packed.experts
