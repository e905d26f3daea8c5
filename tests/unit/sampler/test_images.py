"""Unit tests of prompts with images and videos in the torch engine."""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Qwen2_5_VLForConditionalGeneration

from fixtures.tiny_vision import build_tiny_vision, picture
from twinkle.data_format import LoraConfig, SamplingParams
from twinkle.model import TransformersModel
from twinkle.nn import PackedCausalLM
from twinkle.sampler import TorchSampler
from twinkle.sampler.engine import EngineConfig, SamplerEngine
from twinkle.sampler.errors import InvalidPrompt
from twinkle.sampler.inputs import refuse_media
from twinkle.sampler.prompt_media import prompt_media
from twinkle.template import Template

GREEDY = SamplingParams(max_tokens=12, temperature=0.0, logprobs=0)
TEXT = {'messages': [{'role': 'user', 'content': 'hello there'}]}
MEDIA_CHAT = {
    'messages': [{'role': 'user', 'content': 'a <image> b <video> c <image>?'}],
    'images': [picture(64, 48), picture(32, 96, seed=1)],
    'videos': [{'video': [picture(48, 32, seed=2), picture(48, 32, seed=3), picture(48, 32, seed=4)], 'fps': 1.0}],
}


@pytest.fixture(scope='session')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny vision-language model; read-only."""
    return build_tiny_vision(tmp_path_factory.mktemp('vision') / 'tiny', seed=3)


def generated(folder, feature):
    """Return the greedy tokens of transformers."""
    model = Qwen2_5_VLForConditionalGeneration.from_pretrained(folder)
    ids = torch.as_tensor(np.asarray(feature['input_ids']), dtype=torch.int64)[None]
    media = {name: torch.as_tensor(feature[name]) for name in (
        'pixel_values', 'image_grid_thw', 'pixel_values_videos', 'video_grid_thw', 'second_per_grid_ts'
    )}  # fmt: skip
    kinds = (ids == 5).int() + 2 * (ids == 6).int()
    whole = model.generate(ids, **media, mm_token_type_ids=kinds, max_new_tokens=12, do_sample=False)
    return whole[0, ids.shape[1] :].tolist()


def test_greedy_tokens_equal_transformers(folder):
    """Prompts with images and a video give the greedy tokens of transformers, even in a batch with a text prompt."""
    sampler = TorchSampler(str(folder))
    prompt = Template(str(folder)).encode(MEDIA_CHAT, add_generation_prompt=True)
    alone = sampler.sample(MEDIA_CHAT, GREEDY)[0].sequences[0]
    assert alone.tokens == generated(folder, prompt)[: len(alone.tokens)]
    batched = sampler.sample([TEXT, MEDIA_CHAT], GREEDY)[1].sequences[0]
    assert (batched.tokens, batched.logprobs) == (alone.tokens, alone.logprobs)


def test_prompt_chunks_do_not_affect_the_result(folder):
    """An image that is split across prompt chunks gives the same result."""
    model = PackedCausalLM.load(folder)
    feature = Template(str(folder)).encode(MEDIA_CHAT, add_generation_prompt=True)
    all_tokens = []
    for size in (512, 7):
        engine = SamplerEngine(model, config=EngineConfig(prefill_chunk_tokens=size))
        media = prompt_media(feature, model.media)
        engine.add_request('it', feature['input_ids'], GREEDY, media=media)
        tokens = []
        while not engine.is_idle:
            tokens += [token for event in engine.step() for token in getattr(event, 'tokens', [])]
        all_tokens.append(tokens)
    assert all_tokens[0] == all_tokens[1]


def test_the_trainer_computes_the_same_log_probabilities(folder):
    """Trainer and sampler compute the same log-probabilities for a turn with images."""
    model = TransformersModel(str(folder))
    model.add_adapter_to_model('default', LoraConfig(r=4))
    sampler = TorchSampler(str(folder))
    sequence = sampler.sample(MEDIA_CHAT, SamplingParams(max_tokens=8, temperature=1.0, seed=1, logprobs=0))[
        0
    ].sequences[0]
    feature = sequence.new_input_feature
    (logps,) = model.forward_only([feature])['logps']
    np.testing.assert_allclose(logps, feature['old_logps'], atol=1e-5)


def test_inconsistent_media_are_refused(folder, tiny_llama_dir):
    """Images for a text model or engine, and positions of a wrong length, are refused."""
    feature = Template(str(folder)).encode(MEDIA_CHAT, add_generation_prompt=True)
    text = Template(str(folder)).encode(TEXT, add_generation_prompt=True)
    refuse_media(text)
    with pytest.raises(InvalidPrompt):
        refuse_media(feature)
    small = {name: feature[name] for name in ('pixel_values', 'image_grid_thw')}
    for sampler, prompt in (
        (TorchSampler(str(tiny_llama_dir)), {**text, **small}),
        (TorchSampler(str(folder)), {**feature, 'position_ids': np.zeros((3, 4), np.int32)}),
    ):
        with pytest.raises(InvalidPrompt):
            sampler.sample(prompt, GREEDY)


def test_malformed_media_prompts_are_refused(folder):
    """Ids, labels and positions with an invalid shape, type or value are refused; `labels` may be None."""
    template, sampler = Template(str(folder)), TorchSampler(str(folder))
    feature = template.encode(MEDIA_CHAT, add_generation_prompt=True)
    changes = [
        *({'labels': invalid} for invalid in ([1, 2], 'none', [[1], [1, 2]])),
        *({'position_ids': invalid} for invalid in ([[0], [0, 1], [0]], -np.asarray(feature['position_ids']))),
        *({'input_ids': invalid} for invalid in (None, 'abc', [[1, 2]], [0.5, 1.0])),
    ]
    for change in changes:
        with pytest.raises(InvalidPrompt):
            sampler.sample({**feature, **change}, GREEDY)
    text = template.encode(TEXT, add_generation_prompt=True)
    for prompt in (text, feature):
        tokens = [sampler.sample({**prompt, **more}, GREEDY)[0].sequences[0].tokens for more in ({}, {'labels': None})]
        assert tokens[0] == tokens[1]
