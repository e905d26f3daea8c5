"""Tests of architectures other than those of the tiny models: they run packed or are refused with an error."""

from pathlib import Path

import peft
import pytest
import torch
import transformers

from fixtures.peft_oracle import build_peft_model, label_logprobs, lora_gradients
from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, LoraWeights, PackedCausalLM, SequenceSpan, UnsupportedModel

SIZES = {
    'hidden_size': 64,
    'intermediate_size': 96,
    'num_hidden_layers': 2,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'vocab_size': 128,
    'max_position_embeddings': 128,
    'pad_token_id': 0,
}
WINDOWED = {'sliding_window': 8}
"""Attention with a sliding window."""
DELTA_NET = {
    'head_dim': 16,
    'layer_types': ['linear_attention', 'full_attention'],
    'linear_num_value_heads': 4,
    'linear_num_key_heads': 2,
    'linear_key_head_dim': 8,
    'linear_value_head_dim': 16,
}
"""One recurrent Gated DeltaNet layer and one attention layer."""
LATENT = {'q_lora_rank': 16, 'kv_lora_rank': 16, 'qk_rope_head_dim': 8, 'qk_nope_head_dim': 16, 'v_head_dim': 16}
"""Multi-head latent attention, whose keys and values have different head sizes."""
DENSE = {'first_k_dense_replace': 2, 'num_key_value_heads': 4}
"""Dense layers only, in architectures that otherwise use mixtures of experts."""
ARCHITECTURES = {
    'mistral': (transformers.MistralConfig, {**WINDOWED}),
    'gemma': (transformers.GemmaConfig, {'head_dim': 16}),
    'gemma3': (
        transformers.Gemma3TextConfig,
        {'head_dim': 16, **WINDOWED, 'layer_types': ['sliding_attention', 'full_attention']},
    ),
    'phi3': (transformers.Phi3Config, {}),
    'olmo2': (transformers.Olmo2Config, {}),
    'qwen3.5': (transformers.Qwen3_5TextConfig, DELTA_NET),
    'qwen3-next': (transformers.Qwen3NextConfig, {**DELTA_NET, 'num_experts': 0, 'mlp_only_layers': [0, 1]}),
    'deepseek-v2': (transformers.DeepseekV2Config, {**LATENT, **DENSE}),
    'deepseek-v3': (transformers.DeepseekV3Config, {**LATENT, **DENSE}),
    'granite': (
        transformers.GraniteConfig,
        {'logits_scaling': 6.0, 'embedding_multiplier': 3.0, 'residual_multiplier': 0.3, 'attention_multiplier': 0.1},
    ),
    'cohere': (transformers.CohereConfig, {'logit_scale': 0.5}),
    'olmo-clipped': (transformers.OlmoConfig, {'clip_qkv': 0.05}),
    'qwen2-windowed': (transformers.Qwen2Config, {**WINDOWED, 'use_sliding_window': True, 'max_window_layers': 0}),
}
"""Supported architectures: the configuration class and the fields that differ from `SIZES`."""
REFUSED = {
    'gemma2': (transformers.Gemma2Config, {'head_dim': 16}),
    'gptj': (transformers.GPTJConfig, {'rotary_dim': 8}),
}
"""Unsupported architectures, in the format of `ARCHITECTURES`."""


def build(folder: Path, config_class: type, fields: dict) -> Path:
    """Save a random tiny model of an architecture, and return the folder."""
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config_class(**{**SIZES, **fields})).save_pretrained(folder)
    return folder


@pytest.mark.parametrize('name', ARCHITECTURES)
def test_architecture_gives_the_logits_of_transformers(name, tmp_path):
    """Packed logits equal those of transformers, even beyond a sliding window, and all linear layers can be adapted."""
    folder = build(tmp_path, *ARCHITECTURES[name])
    model = PackedCausalLM.load(folder)
    plain = transformers.AutoModelForCausalLM.from_pretrained(folder, attn_implementation='eager')
    ids = [torch.randint(1, 128, (length,), generator=torch.Generator().manual_seed(length)) for length in (30, 5)]
    spans = [SequenceSpan(0, 30), SequenceSpan(30, 35)]
    positions = torch.cat([torch.arange(30), torch.arange(5)])
    with torch.no_grad():
        logits = model.logits(model.hidden(torch.cat(ids), positions, sequences=spans)).split([30, 5])
        for own, tokens in zip(logits, ids, strict=True):
            torch.testing.assert_close(own, plain(tokens[None]).logits[0].float(), atol=2e-5, rtol=1e-4)
    weights = LoraWeights.create(model.layers, LoraConfig(r=2), seed=0, is_trainable=True)
    adapters = [AdapterSpan(0, 35, weights)]
    hidden = model.hidden(torch.cat(ids), positions, sequences=spans, adapters=adapters)
    model.label_logprobs(hidden, torch.cat(ids)).sum().backward()
    assert all(factors.b.grad.abs().sum() > 0 for factors in weights.factors.values())


@pytest.mark.parametrize('name', REFUSED)
def test_unsupported_architecture_is_refused(name, tmp_path):
    """A model with soft-capped attention or with attention that cannot be replaced is refused when it is loaded."""
    folder = build(tmp_path, *REFUSED[name])
    with pytest.raises(UnsupportedModel):
        PackedCausalLM.load(folder)


@pytest.mark.parametrize(
    'name', ['cohere', 'gemma', 'gemma3', 'granite', 'mistral', 'olmo-clipped', 'olmo2', 'qwen3.5']
)
def test_gradients_equal_peft(name, tmp_path):
    """Gradients equal peft's with offset norms, scaled logits, clipped projections, windows and recurrent layers."""
    folder = build(tmp_path, *ARCHITECTURES[name])
    model = PackedCausalLM.load(folder)
    fields = {'r': 4, 'lora_alpha': 12, 'rank_pattern': {'q_proj': 2}, 'alpha_pattern': {'down_proj': 3}}
    weights = LoraWeights.create(model.layers, LoraConfig(**fields, use_rslora=True), seed=0)
    for index, factors in enumerate(weights.factors.values()):
        factors.b.copy_(0.1 * torch.randn(factors.b.shape, generator=torch.Generator().manual_seed(index)))
    weights.requires_grad_(is_trainable=True)
    ids, labels = (torch.randint(1, 128, (30,), generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    spans = {'sequences': [SequenceSpan(0, 30)], 'adapters': [AdapterSpan(0, 30, weights)]}
    model.label_logprobs(model.hidden(ids, torch.arange(30), **spans), labels).mean().backward()
    config = peft.LoraConfig(**fields, use_rslora=True, target_modules='all-linear')
    oracle = build_peft_model(folder, config, weights.peft_state())
    label_logprobs(oracle, ids.tolist(), labels.tolist()).mean().backward()
    expected = lora_gradients(oracle)
    for path, tensor in weights.named_parameters().items():
        torch.testing.assert_close(tensor.grad, expected[path], atol=1e-5, rtol=1e-3)


def test_bfloat16_base_trains_a_float32_adapter(tiny_llama_dir):
    """A bfloat16 base model trains a float32 adapter with gradients close to those of a float32 base model."""
    gradients = []
    for dtype in ('float32', 'bfloat16'):
        model = PackedCausalLM.load(tiny_llama_dir, dtype=dtype)
        weights = LoraWeights.create(model.layers, LoraConfig(r=2), seed=0, is_trainable=True)
        ids = torch.arange(3, 43)
        spans = {'sequences': [SequenceSpan(0, 40)], 'adapters': [AdapterSpan(0, 40, weights)]}
        logprobs = model.label_logprobs(model.hidden(ids, torch.arange(40), **spans), ids.flip(0))
        assert logprobs.dtype == torch.float32
        logprobs.sum().backward()
        gradients.append(torch.cat([factors.b.grad.flatten() for factors in weights.factors.values()]))
    assert gradients[1].dtype == torch.float32
    assert torch.cosine_similarity(*gradients, dim=0) > 0.99
