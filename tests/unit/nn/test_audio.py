"""Tests of packs with audio, compared with transformers, peft and other packs of the same rows."""

from pathlib import Path

import peft
import pytest
import torch
from transformers import Qwen2AudioForConditionalGeneration

from fixtures.tiny_audio import build_tiny_audio
from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, LoraWeights, MediaSpan, PackedCausalLM, PackError, SequenceSpan

AUDIBLE, FRAMES, BANDS = 61, 200, 16
"""Frames with sound, all frames, and mel bands of the clip."""


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny audio-language model; read-only."""
    return build_tiny_audio(tmp_path_factory.mktemp('audio') / 'tiny')


def random_clip():
    """Return the mel bands of one clip, float32 [frames, bands]."""
    return torch.randn(FRAMES, BANDS, generator=torch.Generator().manual_seed(1))


def random_ids(before, clip, after):
    """Return the tokens of text, a clip, and text."""
    text = torch.randint(6, 320, (before + after,), generator=torch.Generator().manual_seed(2))
    return torch.cat([text[:before], torch.full((clip,), 5), text[before:]])


def test_logits_and_gradients_equal_transformers_and_peft(folder):
    """Logits and LoRA gradients of a sequence with a clip equal those of transformers with peft."""
    model = PackedCausalLM.load(folder)
    weights = LoraWeights.create(model.layers, LoraConfig(r=4, lora_alpha=8), seed=0)
    for factors in weights.factors.values():
        factors.b.copy_(0.1 * torch.randn(factors.b.shape, generator=torch.Generator().manual_seed(3)))
    weights.requires_grad_(is_trainable=True)
    grid = (AUDIBLE, FRAMES, 1)
    count = model.media.token_count(grid)
    ids, clip = random_ids(5, count, 9), random_clip()
    plain = Qwen2AudioForConditionalGeneration.from_pretrained(folder, attn_implementation='eager')
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules=r'.*language_model.*\.(q|k|v|o|gate|up|down)_proj')
    oracle = peft.get_peft_model(plain, config).eval()
    state = {name: one.clone() for name, one in weights.peft_state().items()}
    assert not peft.set_peft_model_state_dict(oracle, state).unexpected_keys
    mask = (torch.arange(FRAMES) < AUDIBLE).long()[None]
    expected = oracle(
        input_ids=ids[None],
        attention_mask=torch.ones(1, len(ids), dtype=torch.int64),
        input_features=clip.T[None],
        feature_attention_mask=mask,
    ).logits[0]
    hidden = model.hidden(
        ids,
        torch.arange(len(ids)),
        sequences=[SequenceSpan(0, len(ids))],
        adapters=[AdapterSpan(0, len(ids), weights)],
        media=[MediaSpan(5, 5 + count, 'audio', clip, grid)],
    )
    logits = model.logits(hidden)
    torch.testing.assert_close(logits, expected, atol=2e-5, rtol=1e-5)
    for values in (logits, expected):
        values.log_softmax(-1)[:, 9].mean().backward()
    expected_gradients = {
        name.replace('.default.', '.'): one.grad for name, one in oracle.named_parameters() if one.requires_grad
    }
    assert weights.named_parameters().keys() == expected_gradients.keys()
    for name, parameter in weights.named_parameters().items():
        torch.testing.assert_close(parameter.grad, expected_gradients[name], atol=1e-5, rtol=1e-4)


def test_a_clip_and_text_in_one_pass_do_not_change_results(folder):
    """Text and a clip get bitwise the same results in a shared pass as in separate passes."""
    model = PackedCausalLM.load(folder)
    grid, text = (AUDIBLE, FRAMES, 1), random_ids(8, 0, 14)
    ids = random_ids(5, model.media.token_count(grid), 9)

    def run(parts):
        spans, media, row = [], [], 0
        for part in parts:
            spans.append(SequenceSpan(row, row + len(part)))
            if part is ids:
                media.append(MediaSpan(row + 5, row + len(part) - 9, 'audio', random_clip(), grid))
            row += len(part)
        positions = torch.cat([torch.arange(len(part)) for part in parts])
        return model.hidden(torch.cat(parts), positions, sequences=spans, media=media).split([len(x) for x in parts])

    with torch.no_grad():
        beside_text, beside_clip = run([text, ids])
        assert torch.equal(run([text])[0], beside_text)
        assert torch.equal(run([ids])[0], beside_clip)


def test_positions_on_three_axes_are_refused(folder):
    """An audio model refuses positions on three axes."""
    with pytest.raises(PackError):
        PackedCausalLM.load(folder).hidden(
            torch.tensor([7, 8]), torch.zeros((3, 2), dtype=torch.int64), sequences=[SequenceSpan(0, 2)]
        )
