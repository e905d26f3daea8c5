"""Tests of how adapters are created, targeted, saved and loaded."""

import peft
import pytest
import torch
from transformers import AutoModelForCausalLM

from twinkle.data_format import LoraConfig
from twinkle.nn import (
    AdapterSpan,
    LoraWeights,
    PackedCausalLM,
    SequenceSpan,
    UnknownTargetModules,
    load_adapter,
    save_adapter,
)

LAYERS = {'model.layers.0.self_attn.q_proj': (8, 6), 'model.layers.0.mlp.up_proj': (8, 16)}


def test_initial_weights_follow_the_seed_and_have_no_effect():
    """A depends on the seed and stays within its bound; B is zero."""
    first, same, other = (LoraWeights.create(LAYERS, LoraConfig(r=3), seed=seed) for seed in (1, 1, 2))
    path = 'model.layers.0.mlp.up_proj'
    assert torch.equal(first.factors[path].a, same.factors[path].a)
    assert not torch.equal(first.factors[path].a, other.factors[path].a)
    assert first.factors[path].a.abs().max() <= 8**-0.5
    assert not first.factors[path].b.any()


def test_patterns_set_rank_and_scaling():
    """`rank_pattern` and `alpha_pattern` match the end of a path; rsLoRA divides by the square root of the rank."""
    config = LoraConfig(
        r=4, lora_alpha=8, use_rslora=True, rank_pattern={'q_proj': 1}, alpha_pattern={'mlp.up_proj': 6}
    )
    weights = LoraWeights.create(LAYERS, config, seed=0)
    query, up = weights.factors.values()
    assert (query.a.shape, query.scaling) == ((1, 8), 8.0)
    assert (up.a.shape, up.scaling) == ((4, 8), 3.0)


@pytest.mark.parametrize(
    'config',
    [
        LoraConfig(target_modules=('q_proj', 'w_proj')),
        LoraConfig(target_modules=('q_proj',), rank_pattern={'up_proj': 2}),
    ],
)
def test_unknown_names_are_refused(config):
    """The error for a name that matches no layer lists the known names."""
    with pytest.raises(UnknownTargetModules) as refusal:
        LoraWeights.create(LAYERS, config, seed=0)
    assert 'q_proj' in refusal.value.known


def test_mismatched_state_changes_nothing():
    """Missing, unexpected and misshapen tensors are refused before any tensor is copied."""
    weights = LoraWeights.create(LAYERS, LoraConfig(r=3), seed=0)
    before = {name: tensor.clone() for name, tensor in weights.peft_state().items()}
    changed = {name: tensor + 1 for name, tensor in before.items()}
    last = list(changed)[-1]
    for broken in (
        {**changed, 'x': changed[last]},
        {k: v for k, v in changed.items() if k != last},
        {**changed, last: changed[last].T},
    ):
        with pytest.raises(ValueError, match=r'do not match the adapter|must have shape'):
            weights.load_peft_state(broken)
    assert all(torch.equal(before[name], tensor) for name, tensor in weights.peft_state().items())


def test_saved_folder_gives_the_same_logits_in_plain_peft(tiny_llama_dir, tmp_path):
    """A saved folder gives the same logits in peft and in this library, even if peft saved the folder."""
    model = PackedCausalLM.load(tiny_llama_dir)
    config = LoraConfig(r=4, lora_alpha=8, rank_pattern={'q_proj': 2}, alpha_pattern={'v_proj': 5})
    weights = LoraWeights.create(model.layers, config, seed=0)
    for factors in weights.factors.values():
        factors.b.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    save_adapter(weights, tmp_path / 'ours', base_model=str(tiny_llama_dir))
    ids = torch.arange(40)
    plain = peft.PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tiny_llama_dir), tmp_path / 'ours')
    plain.save_pretrained(tmp_path / 'theirs')
    back = load_adapter(tmp_path / 'theirs', model.layers)
    assert back.config.rank_pattern == config.rank_pattern
    with torch.no_grad():
        expected = plain(ids[None]).logits[0]
        for adapter in (weights, back):
            spans = {'sequences': [SequenceSpan(0, 40)], 'adapters': [AdapterSpan(0, 40, adapter)]}
            logits = model.logits(model.hidden(ids, torch.arange(40), **spans))
            torch.testing.assert_close(logits, expected, atol=1e-4, rtol=0)
