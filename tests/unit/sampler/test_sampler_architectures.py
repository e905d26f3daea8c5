"""Unit tests of the torch engine with different kinds of layers: memory, isolation and continuation."""

import random
from pathlib import Path

import pytest
import torch

from fixtures.architecture_variants import VARIANTS
from fixtures.architectures import build_tiny
from fixtures.engine_runs import Gathered, drain, make_adapter, make_engine, run_all
from twinkle.data_format import SamplingParams
from twinkle.nn import CacheSize, KVCache, PackedCausalLM, SequenceSpan
from twinkle.sampler.engine import SequenceSoFar

ARCHITECTURES = (
    'deepseek_v3',
    'gemma3_text',
    'gemma4_text with shared keys',
    'qwen3_5_text',
    'qwen3_5_text without attention',
    'qwen3_moe',
)
"""Latent attention, sliding windows, layers that share keys, recurrent layers with and without attention, experts."""
LONG = list(range(3, 43))
"""A prompt of three chunks."""
SAMPLED = SamplingParams(max_tokens=6, seed=5, num_samples=3, logprobs=2, ignore_eos=True)


@pytest.fixture(scope='module', params=ARCHITECTURES)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PackedCausalLM:
    """A tiny model of each architecture."""
    folder: Path = tmp_path_factory.mktemp('model')
    build_tiny(*variant_of(request.param, folder))
    return PackedCausalLM.load(folder)


def variant_of(name: str, folder: Path) -> tuple:
    """Return the arguments of `build_tiny` for an architecture or a variant."""
    model_type, fields = VARIANTS.get(name, (name, {}))
    return model_type, folder, fields


def others_of(model: PackedCausalLM, seed: int) -> dict:
    """Return requests of other tenants with random prompts."""
    rng = random.Random(seed)
    lengths = [rng.randint(1, 40) for _ in range(3)]
    return {
        f'other {index}': (
            [rng.randrange(3, 100) for _ in range(length)],
            SamplingParams(max_tokens=rng.randint(1, 8), seed=seed, num_samples=1 + index % 2),
            make_adapter(model, 'other', 7 + seed) if index else None,
        )
        for index, length in enumerate(lengths)
    }


@pytest.mark.parametrize('length', [1, 40, 64, 100])
def test_memory_of_a_sequence_is_known(model, length):
    """The cache of a sequence uses exactly the computed memory and reports the sequence's length."""
    cache = KVCache(length)
    ids = torch.randint(3, 100, (length,), generator=torch.Generator().manual_seed(0))
    with torch.inference_mode():
        model.hidden(ids, torch.arange(length), sequences=[SequenceSpan(0, length, cache)])
    assert cache.size_bytes == model.cache_size.of(length)
    assert cache.length == length


def test_memory_limits_the_admitted_sequences(model):
    """The engine runs as many sequences as fit in the memory, and the caches never exceed it."""
    budget = 2 * model.cache_size.of(50)
    engine = make_engine(model, kv_cache_memory_bytes=budget)
    params = SamplingParams(max_tokens=10, ignore_eos=True)
    results = {str(index): Gathered() for index in range(5)}
    for name in results:
        engine.add_request(name, LONG, params)
    running, allocated = [], []
    while not engine.is_idle:
        for event in engine.step():
            results[event.request_id].take(event)
        running.append(engine.load.running_sequences)
        allocated.append(engine.cache_bytes_allocated)
    assert max(running) == 2
    assert budget / 2 < max(allocated) <= budget
    assert all(len(tokens) == 10 for result in results.values() for tokens in result.tokens)


def test_memory_for_less_than_one_token_is_refused(model):
    """An engine whose memory cannot hold one token is refused with the required size."""
    needed = model.cache_size.of(1)
    with pytest.raises(ValueError, match=f'kv_cache_memory_bytes must be at least {needed}'):
        make_engine(model, kv_cache_memory_bytes=needed - 1)
    make_engine(model, kv_cache_memory_bytes=needed)


def test_memory_bounds_the_context():
    """Memory and model limit the context; if tokens need no memory, only the model limits the context."""
    assert CacheSize(bytes_per_token=10, bytes_per_sequence=100).longest(1000, limit=512) == 90
    assert CacheSize(bytes_per_token=10, bytes_per_sequence=100).longest(1000, limit=50) == 50
    assert CacheSize(bytes_per_token=10, bytes_per_sequence=100).longest(99, limit=50) == 0
    assert CacheSize(bytes_per_token=0, bytes_per_sequence=100).longest(1000, limit=512) == 512


def test_other_requests_leave_samples_bitwise_unchanged(model):
    """Several samples of a prompt with several chunks are bitwise the same in a batch with any other requests."""
    request = {'it': (LONG, SAMPLED, make_adapter(model, 'own', 0))}
    alone = run_all(make_engine(model), request)['it']
    assert len({tuple(tokens) for tokens in alone.tokens}) > 1
    for seed in (1, 2, 3):
        others = others_of(model, seed)
        beside = run_all(make_engine(model), {**others, **request} if seed % 2 else {**request, **others})['it']
        assert beside.tokens == alone.tokens
        assert beside.logprobs == alone.logprobs


@pytest.mark.parametrize('delivered', [1, 3, 5])
def test_continued_samples_equal_uninterrupted_samples(model, delivered):
    """An engine that continues another engine's samples, with other requests in its batch, gives the same tokens."""
    adapter = make_adapter(model, 'own', 0)
    whole = run_all(make_engine(model), {'it': (LONG, SAMPLED, adapter)})['it']
    engine = make_engine(model)
    so_far = [SequenceSoFar(token_ids=tuple(tokens[:delivered]), is_finished=False) for tokens in whole.tokens]
    results = {'it': Gathered(SAMPLED.num_samples)}
    for name, (prompt, params, other) in others_of(model, delivered).items():
        engine.add_request(name, prompt, params, adapter=other)
        results[name] = Gathered(params.num_samples)
    engine.add_request('it', LONG, SAMPLED, adapter=adapter, continued=so_far)
    drain(engine, results)
    assert results['it'].tokens == [tokens[delivered:] for tokens in whole.tokens]
    assert results['it'].logprobs == [values[delivered:] for values in whole.logprobs]
