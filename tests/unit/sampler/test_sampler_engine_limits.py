"""Unit tests of the torch engine's refusals, aborts, parking and memory limits."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from fixtures.engine_runs import PROMPTS, Gathered, drain, make_engine, run_one
from twinkle.data_format import SamplingParams, StopReason
from twinkle.nn import PackedCausalLM
from twinkle.sampler.engine import SamplerEngine, TokenEvent
from twinkle.sampler.errors import (
    ContextExceeded,
    DuplicateRequest,
    InvalidPrompt,
    InvalidSamplingParams,
    UnknownRequest,
)


@pytest.fixture(scope='module')
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """Tiny model that all engines share."""
    return PackedCausalLM.load(tiny_llama_dir)


@pytest.fixture
def engine(model: PackedCausalLM, tiny_llama_dir: Path) -> SamplerEngine:
    """An engine with slots for a few sequences."""
    return make_engine(model, Tokenizer.from_file(str(tiny_llama_dir / 'tokenizer.json')))


@pytest.mark.parametrize(
    ('prompt', 'params', 'error'),
    [
        ([], {}, InvalidPrompt),
        ([1, 320], {}, InvalidPrompt),
        ([-1], {}, InvalidPrompt),
        ([1] * 10, {'max_tokens': 503}, ContextExceeded),
        ([1] * 512, {}, ContextExceeded),
        ([1], {'max_tokens': 2, 'min_tokens': 3}, InvalidSamplingParams),
        ([1], {'stop': ['']}, InvalidSamplingParams),
        ([1], {'stop': [320]}, InvalidSamplingParams),
    ],
)
def test_bad_requests_change_nothing(engine, prompt, params, error):
    """An invalid request is refused before any work."""
    with pytest.raises(error):
        engine.add_request('it', prompt, SamplingParams(**params))
    assert engine.is_idle


def test_context_error_has_the_token_counts(engine):
    """ContextExceeded has the numbers of prompt tokens, new tokens and context tokens."""
    with pytest.raises(ContextExceeded) as caught:
        engine.add_request('it', [1] * 500, SamplingParams(max_tokens=13))
    assert (caught.value.prompt_tokens, caught.value.max_tokens, caught.value.context_tokens) == (500, 13, 512)


def test_stop_strings_need_a_tokenizer(model):
    """An engine without a tokenizer refuses stop strings."""
    with pytest.raises(InvalidSamplingParams):
        make_engine(model).add_request('it', [1], SamplingParams(stop='x'))


def test_abort_frees_memory_immediately(engine):
    """Aborting a waiting, prefilling or running request frees its memory, and ends each unfinished sequence once."""
    params = SamplingParams(max_tokens=20, num_samples=4, ignore_eos=True)
    for name in ('running', 'second', 'waiting'):
        engine.add_request(name, PROMPTS[3], params)
    events = [event for _ in range(5) for event in engine.step()]
    sampled_count = sum(
        len(event.tokens) for event in events if isinstance(event, TokenEvent) and event.sequence_index == 0
    )
    for name in ('waiting', 'second', 'running'):
        aborted = engine.abort(name)
        assert sorted(event.sequence_index for event in aborted) == [0, 1, 2, 3]
        assert {event.stop_reason for event in aborted} == {StopReason.ABORT}
    assert engine.is_idle
    assert engine.load.cache_bytes_reserved == 0
    assert sampled_count > 0
    assert engine.step() == []
    with pytest.raises(UnknownRequest):
        engine.abort('running')


def test_a_duplicate_request_id_is_refused(engine):
    """A second request with the id of an unfinished request is refused."""
    engine.add_request('it', [5], SamplingParams(max_tokens=2))
    with pytest.raises(DuplicateRequest):
        engine.add_request('it', [5], SamplingParams(max_tokens=2))


def test_parked_request_waits_and_resumes_unchanged(model):
    """Parking stops only the parked request, whose result is the same after it resumes."""
    params = SamplingParams(max_tokens=8, seed=1, ignore_eos=True)
    expected = run_one(make_engine(model), PROMPTS[0], max_tokens=8, seed=1, ignore_eos=True).tokens
    engine = make_engine(model)
    results = {'parked': Gathered(), 'other': Gathered()}
    for name in results:
        engine.add_request(name, PROMPTS[0], params)
    for event in engine.step():
        results[event.request_id].take(event)
    engine.set_parked('parked', is_parked=True)
    while results['other'].reasons[0] is None:
        for event in engine.step():
            results[event.request_id].take(event)
    assert len(results['parked'].tokens[0]) == 1
    assert engine.step() == []
    engine.set_parked('parked', is_parked=False)
    drain(engine, results)
    assert results['parked'].tokens == results['other'].tokens == expected


def test_admission_waits_for_memory(model):
    """Requests wait for key-value memory, and the allocated size stays within the budget."""
    budget = model.cache_size.of(100)
    engine = make_engine(model, kv_cache_memory_bytes=budget)
    params = SamplingParams(max_tokens=20, num_samples=2, ignore_eos=True)
    results = {str(i): Gathered(2) for i in range(4)}
    for name in results:
        engine.add_request(name, PROMPTS[3], params)
    max_allocated = 0
    while not engine.is_idle:
        for event in engine.step():
            results[event.request_id].take(event)
        max_allocated = max(max_allocated, engine.cache_bytes_allocated)
        assert engine.load.running_sequences <= 2
    assert 0 < max_allocated <= budget
    assert all(len(tokens) == 20 for result in results.values() for tokens in result.tokens)
    assert engine.admission.context_tokens == 100
