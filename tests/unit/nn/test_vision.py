"""Tests of packs with images, compared with transformers, peft and other packs of the same rows."""

from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from fixtures import isolation
from fixtures.tiny_vision import build_tiny_vision
from twinkle.data_format import LoraConfig
from twinkle.nn import (
    AdapterSpan,
    FullWeights,
    LoraWeights,
    MediaSpan,
    PackedCausalLM,
    PackError,
    SequenceSpan,
    UnsupportedModel,
)

GRID = (1, 4, 6)
"""Patches of an image: numbers of frames, rows and columns."""
IMAGE, VIDEO = 5, 6
"""Token ids that stand for image and video patches."""


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny')


def random_patches(grid=GRID, seed=0):
    """Return random patches of one image."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(int(np.prod(grid)), 3 * 2 * 8 * 8, generator=generator)


def random_ids(before, tokens, after, *, token_id=IMAGE, seed=0):
    """Return the tokens of text, an image, and text."""
    text = torch.randint(7, 320, (before + after,), generator=torch.Generator().manual_seed(seed))
    return torch.cat([text[:before], torch.full((tokens,), token_id), text[before:]])


def random_weights(model, seed=0):
    """Return trainable weights with a nonzero B."""
    weights = LoraWeights.create(model.layers, LoraConfig(r=4, lora_alpha=8), seed=seed)
    generator = torch.Generator().manual_seed(seed + 1)
    for factors in weights.factors.values():
        factors.b.copy_(0.1 * torch.randn(factors.b.shape, generator=generator))
    return weights.requires_grad_(is_trainable=True)


def plain_positions(plain, ids, **grids):
    """Return the positions that transformers computes, [3, tokens]."""
    kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
    return plain.model.get_rope_index(ids[None], kinds[None], **grids)[0][:, 0]


def oracle_of(folder, weights):
    """Return the model of transformers with these weights as a LoRA adapter of peft."""
    plain = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder, attn_implementation='eager')
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=r'.*language_model.*\.(q|k|v|o|gate|up|down)_proj')
    oracle = peft.get_peft_model(plain, config)
    result = peft.set_peft_model_state_dict(oracle, {name: one.clone() for name, one in weights.peft_state().items()})
    assert not result.unexpected_keys
    return oracle


@pytest.mark.parametrize(('kind', 'token_id', 'grid'), [('image', IMAGE, GRID), ('video', VIDEO, (3, 4, 4))])
def test_logits_and_gradients_equal_transformers_and_peft(folder, kind, token_id, grid):
    """Logits and LoRA gradients of a sequence with an image or a video equal those of transformers with peft."""
    model = PackedCausalLM.load(folder)
    weights = random_weights(model)
    count = model.media.token_count(grid)
    ids, patches = random_ids(7, count, 12, token_id=token_id), random_patches(grid)
    oracle = oracle_of(folder, weights)
    positions = plain_positions(oracle.base_model.model, ids, **{f'{kind}_grid_thw': torch.tensor([grid])})
    name = 'pixel_values' if kind == 'image' else 'pixel_values_videos'
    expected = oracle(
        input_ids=ids[None],
        position_ids=positions[:, None],
        **{name: patches, f'{kind}_grid_thw': torch.tensor([grid])},
    ).logits[0]
    hidden = model.hidden(
        ids,
        positions,
        sequences=[SequenceSpan(0, len(ids))],
        adapters=[AdapterSpan(0, len(ids), weights)],
        media=[MediaSpan(7, 7 + count, kind, patches, grid)],
    )
    logits = model.logits(hidden)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    for values in (logits, expected):
        values.log_softmax(-1)[:, 9].mean().backward()
    expected_gradients = {
        name.replace('.default.', '.'): one.grad for name, one in oracle.named_parameters() if one.requires_grad
    }
    own = weights.named_parameters()
    assert own.keys() == expected_gradients.keys()
    for name, parameter in own.items():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], atol=1e-5, rtol=1e-4)


def run_mix(model, tenants, *, image_seed=3):
    """Run some of three tenants, of whom the second has an image; return logits and gradients by tenant."""
    spans, adapters, media, ids, positions = [], [], [], [], []
    row, found = 0, []
    count = model.media.token_count(GRID)
    for tenant in tenants:
        begin, weights = row, random_weights(model, seed=tenant)
        own = random_ids(5 + tenant, count if tenant == 1 else 0, 9 + 7 * tenant, seed=tenant)
        if tenant == 1:
            media.append(MediaSpan(row + 6, row + 6 + count, 'image', random_patches(seed=image_seed), GRID))
        ids.append(own)
        positions.append(torch.arange(len(own)).expand(3, -1) // (1 + tenant % 2))
        row += len(own)
        spans.append(SequenceSpan(begin, row))
        adapters.append(AdapterSpan(begin, row, weights, weights.sample_dropout()))
        found.append((begin, row, weights))
    hidden = model.hidden(torch.cat(ids), torch.cat(positions, dim=1), sequences=spans, adapters=adapters, media=media)
    logps = model.label_logprobs(hidden, torch.cat(ids))
    logps.sum().backward()
    return {
        tenant: [logps[begin:end].detach(), *(one.grad for one in weights.parameters())]
        for tenant, (begin, end, weights) in zip(tenants, found, strict=True)
    }


def test_packing_with_images_does_not_change_results(folder):
    """Tenants with text and with images share a pass, and each gets bitwise the same results as alone."""
    model = PackedCausalLM.load(folder)
    together = run_mix(model, (0, 1, 2))
    for tenant in range(3):
        alone = run_mix(model, (tenant,))[tenant]
        assert all(torch.equal(*pair) for pair in zip(alone, together[tenant], strict=True))
    other = run_mix(model, (1,), image_seed=4)[1]
    assert not torch.equal(other[0], together[1][0])


def test_text_in_a_mix_is_bitwise_equal_to_text_alone(folder):
    """Text on a vision model is isolated bitwise, as on a text model."""
    model = PackedCausalLM.load(folder)
    assert [line for seed in range(3) for line in isolation.violations(model, seed, longest=120)] == []


def test_checkpointed_layers_do_not_change_gradients(folder):
    """Checkpointing a vision model changes no log-probability and no gradient of a sequence with an image."""
    plain, checkpointed = (PackedCausalLM.load(folder, is_checkpointed=flag) for flag in (False, True))
    for one, other in zip(run_mix(plain, (1,))[1], run_mix(checkpointed, (1,))[1], strict=True):
        assert torch.equal(one, other)


def test_tower_is_not_trainable(folder):
    """The layers of the vision tower accept no adapters and no full-parameter training."""
    model = PackedCausalLM.load(folder)
    assert all(path.startswith('model.language_model.') for path in model.layers)
    assert any(name.startswith('model.visual.') for name in model.base_parameters)
    with pytest.raises(UnsupportedModel):
        FullWeights(model)


def test_images_that_do_not_fit_are_refused(folder, tiny_llama_dir):
    """An image span with more rows than image tokens is refused; an image on a text model is refused too."""
    span = MediaSpan(2, 9, 'image', random_patches(), GRID)
    ids = random_ids(2, 5, 2)
    arguments = {'sequences': [SequenceSpan(0, 9)], 'media': [span]}
    for each in (folder, tiny_llama_dir):
        with pytest.raises(PackError):
            PackedCausalLM.load(each).hidden(ids, torch.arange(9), **arguments)
