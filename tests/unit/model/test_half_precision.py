"""Tests of isolation, shared prompts and agreement with the sampler, for a model in each dtype.

The layers have the widths of SmolLM2-135M, because kernels divide the sums of narrower layers in only one way.
"""

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3MoeConfig, Qwen3MoeForCausalLM

from twinkle.data_format import InputFeature, LoraConfig, SamplingParams
from twinkle.model.engine import BatchItem, TrainerEngine
from twinkle.nn import PackedCausalLM
from twinkle.sampler.engine import EngineAdapter, PromptEvent, SamplerEngine, TokenEvent

PROMPT = [7 + (11 * index) % 480 for index in range(40)]
LENGTHS = (1, 3, 17, 70, 90, 130)
"""Numbers of tokens after the prompt, for batches that fill whole blocks of rows and parts of blocks."""


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model with two layers in bfloat16."""
    torch.manual_seed(5)
    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=512,
        max_position_embeddings=512,
        eos_token_id=2,
    )
    path = tmp_path_factory.mktemp('wide')
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(path)
    return path


@pytest.mark.slow
def test_experts_are_isolated(tmp_path):
    """A mixture of experts in bfloat16, routers included, has the same results alone and with other adapters."""
    torch.manual_seed(5)
    sizes = {'hidden_size': 576, 'intermediate_size': 1536, 'moe_intermediate_size': 512, 'num_hidden_layers': 2}
    config = Qwen3MoeConfig(
        **sizes, num_attention_heads=9, num_key_value_heads=3, head_dim=64, vocab_size=512, num_experts=96
    )
    Qwen3MoeForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path)
    assert_isolated(PackedCausalLM.load(tmp_path, dtype='bfloat16'))


@pytest.fixture(scope='module', params=['float32', 'bfloat16'])
def model(folder: Path, request: pytest.FixtureRequest) -> PackedCausalLM:
    """The model in one dtype."""
    return PackedCausalLM.load(folder, dtype=request.param)


def engine_of(model, *names):
    """Return an engine with adapters whose updates are not zero."""
    engine = TrainerEngine(model)
    for seed, name in enumerate(names):
        engine.create_adapter(name, LoraConfig(r=8, target_modules='all-linear', seed=seed))
        generator = torch.Generator().manual_seed(seed)
        for parameter in engine.adapter(name).parameters():
            parameter.data.add_(torch.randn(parameter.shape, generator=generator), alpha=0.02)
    return engine


def feature_of(length, seed):
    """Return the prompt followed by random tokens; all tokens have labels."""
    tokens = np.random.default_rng(seed).integers(3, 500, length)
    ids = np.array([*PROMPT, *tokens])
    return InputFeature(input_ids=ids[:-1], labels=ids[1:].copy())


def test_adapters_are_isolated(model):
    """An adapter has bitwise the same log-probabilities and gradients alone and in passes with other adapters."""
    assert_isolated(model)


def assert_isolated(model):
    """Train adapters one after the other and together, and compare the results."""
    names = [f'a{index}' for index in range(len(LENGTHS))]
    batches = {name: [feature_of(length, length)] for name, length in zip(names, LENGTHS, strict=True)}
    alone, together = engine_of(model, *names), engine_of(model, *names)
    expected = {name: alone.forward_backward(name, batches[name]) for name in names}
    results = together.run_batch(
        [BatchItem(adapter_id=name, features=batches[name], is_training=True) for name in names]
    )
    for name, result in zip(names, results, strict=True):
        np.testing.assert_array_equal(result.logps[0], expected[name].logps[0])
        gradients = [
            [parameter.grad for parameter in engine.adapter(name).parameters()] for engine in (alone, together)
        ]
        assert all(torch.equal(own, other) for own, other in zip(*gradients, strict=True))


def test_prompts_are_shared(model):
    """The rows of a common prompt are computed once, and log-probabilities equal those of separate sequences."""
    engine = engine_of(model, 'a')
    features = [feature_of(length, length) for length in LENGTHS]
    shared = engine.forward_backward('a', features)
    assert shared.shared_token_count >= (len(LENGTHS) - 1) * (len(PROMPT) - 1)
    for feature, logps in zip(features, shared.logps, strict=True):
        np.testing.assert_array_equal(engine.forward_backward('a', [feature]).logps[0], logps)


def test_sampler_agrees_with_the_trainer(model):
    """Trainer and sampler have the same log-probabilities: bitwise for a prompt, up to rounding for sampled tokens."""
    trainer, sampler = engine_of(model, 'a'), SamplerEngine(model)
    adapter = EngineAdapter('a', 1, trainer.adapter('a').weights)
    sample = SamplingParams(max_tokens=24, temperature=1.0, seed=3, logprobs=0, ignore_eos=True)
    sampler.add_request('sample', PROMPT, sample, adapter=adapter)
    events = [event for event in finished(sampler) if isinstance(event, TokenEvent)]
    tokens = [*PROMPT, *(token for event in events for token in event.tokens)]
    sampled = [top[0][1] for event in events for top in event.logprobs]
    sampler.add_request('score', tokens, SamplingParams(max_tokens=0, prompt_logprobs=0), adapter=adapter)
    scored = next(event.logprobs for event in finished(sampler) if isinstance(event, PromptEvent))
    feature = InputFeature(input_ids=np.array(tokens[:-1]), labels=np.array(tokens[1:]))
    (expected,) = trainer.forward_only('a', [feature]).logps
    np.testing.assert_array_equal(np.array(scored[1:], np.float32), expected)
    atol = 1e-5 if model.dtype_name == 'float32' else 0.05
    np.testing.assert_allclose(sampled, expected[len(PROMPT) - 1 :], rtol=0, atol=atol)


def finished(sampler):
    """Run all requests to their end, and return their events."""
    events = []
    while not sampler.is_idle:
        events += sampler.step()
    return events
