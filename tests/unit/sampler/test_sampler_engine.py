"""Unit tests of the torch engine: equality with transformers and PEFT, and independence of other requests."""

import math
from pathlib import Path

import peft
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM

from fixtures.engine_runs import PROMPTS, Gathered, drain, make_adapter, make_engine, run_all, run_one
from fixtures.peft_oracle import build_peft_model
from twinkle.data_format import SamplingParams, StopReason
from twinkle.nn import PackedCausalLM
from twinkle.sampler.engine import EngineAdapter, SamplerEngine


@pytest.fixture(scope='module')
def model(tiny_llama_dir: Path) -> PackedCausalLM:
    """Tiny model that all engines share."""
    return PackedCausalLM.load(tiny_llama_dir)


@pytest.fixture(scope='module')
def tokenizer(tiny_llama_dir: Path) -> Tokenizer:
    """The tokenizer of the tiny model."""
    return Tokenizer.from_file(str(tiny_llama_dir / 'tokenizer.json'))


@pytest.fixture(scope='module')
def adapters(model: PackedCausalLM) -> list[EngineAdapter | None]:
    """The base model and two adapters that change the sampled tokens."""
    return [None, make_adapter(model, 'a', 0), make_adapter(model, 'b', 7)]


@pytest.fixture
def engine(model: PackedCausalLM, tokenizer: Tokenizer) -> SamplerEngine:
    """An engine with slots for a few sequences and small prompt chunks."""
    return make_engine(model, tokenizer)


def plain_logprobs(folder: Path, token_ids: list[int]) -> torch.Tensor:
    """Return log-probabilities [tokens, vocabulary] from one forward pass of plain transformers."""
    plain = AutoModelForCausalLM.from_pretrained(folder)
    with torch.no_grad():
        return plain(torch.tensor([token_ids])).logits[0].float().log_softmax(-1)


def generate(oracle: torch.nn.Module, prompt: list[int], max_new_tokens: int, **options) -> list[int]:
    """Return the new tokens of transformers' greedy generate."""
    ids = torch.tensor([prompt])
    with torch.no_grad():
        mask = torch.ones_like(ids)
        out = oracle.generate(ids, attention_mask=mask, max_new_tokens=max_new_tokens, do_sample=False, **options)
    return out[0, len(prompt) :].tolist()


@pytest.mark.parametrize('family', ['tiny_llama_dir', 'tiny_qwen3_dir'])
def test_greedy_equals_generate(family, request):
    """A batch of prompts gives the tokens that transformers generates for each prompt separately."""
    folder = request.getfixturevalue(family)
    oracle = AutoModelForCausalLM.from_pretrained(folder)
    params = SamplingParams(max_tokens=24, temperature=0)
    engine = make_engine(PackedCausalLM.load(folder))
    results = run_all(engine, {str(i): (prompt, params, None) for i, prompt in enumerate(PROMPTS)})
    for index, prompt in enumerate(PROMPTS):
        assert results[str(index)].tokens[0] == generate(oracle, prompt, 24)


def test_greedy_with_adapter_equals_peft(engine, adapters, tiny_llama_dir):
    """A request with an adapter, in a batch with base requests, gives PEFT's tokens."""
    config = peft.LoraConfig(r=4, lora_alpha=8, target_modules='all-linear', task_type='CAUSAL_LM')
    oracle = build_peft_model(tiny_llama_dir, config, adapters[1].weights.peft_state()).eval()
    params = SamplingParams(max_tokens=24, temperature=0)
    requests = {f'{i}': (prompt, params, adapters[1]) for i, prompt in enumerate(PROMPTS)}
    results = run_all(engine, requests | {'base': (PROMPTS[0], params, None)})
    for index, prompt in enumerate(PROMPTS):
        assert results[str(index)].tokens[0] == generate(oracle, prompt, 24)
    assert results['base'].tokens != results['0'].tokens


def test_repetition_penalty_equals_generate(engine, tiny_llama_dir):
    """The repetition penalty counts prompt and new tokens, as in transformers."""
    oracle = AutoModelForCausalLM.from_pretrained(tiny_llama_dir)
    result = run_one(engine, PROMPTS[0], max_tokens=20, temperature=0, repetition_penalty=1.3)
    assert result.tokens[0] == generate(oracle, PROMPTS[0], 20, repetition_penalty=1.3)


def test_other_requests_do_not_affect_a_sample(model, adapters):
    """Tokens and log-probabilities of a request are bitwise the same in a batch and alone."""
    requests = {
        f'{index}-{temperature}': (
            prompt,
            SamplingParams(
                max_tokens=12, temperature=temperature, seed=index, top_p=0.9, logprobs=2, prompt_logprobs=1
            ),
            adapters[index % 3],
        )
        for index, prompt in enumerate(PROMPTS)
        for temperature in (0.0, 1.0)
    }
    together = run_all(make_engine(model), requests)
    for request_id, request in requests.items():
        alone = run_all(make_engine(model), {request_id: request})[request_id]
        assert alone.tokens == together[request_id].tokens
        assert alone.logprobs == together[request_id].logprobs
        assert alone.prompt == together[request_id].prompt


def test_seed_repeats_and_samples_differ(engine):
    """The same seed gives the same samples. The samples of one request differ, and other seeds give other samples."""
    first, repeated = (run_one(engine, PROMPTS[0], max_tokens=12, seed=5, num_samples=3) for _ in range(2))
    other = run_one(engine, PROMPTS[0], max_tokens=12, seed=6, num_samples=3)
    assert first.tokens == repeated.tokens
    assert len({tuple(tokens) for tokens in first.tokens + other.tokens}) == 6


def test_splitting_samples_into_groups_does_not_change_them(model):
    """Samples that need several groups equal the samples of one group."""
    wide = run_one(make_engine(model), PROMPTS[3], max_tokens=6, seed=1, num_samples=8, prompt_logprobs=0)
    narrow = run_one(
        make_engine(model, max_sequences=3), PROMPTS[3], max_tokens=6, seed=1, num_samples=8, prompt_logprobs=0
    )
    assert wide.tokens == narrow.tokens
    assert wide.prompt == narrow.prompt


def test_logprobs_equal_a_full_forward_pass(engine, tiny_llama_dir):
    """Log-probabilities of prompt and completion are those of the model, before temperature and filters."""
    prompt = PROMPTS[3]
    result = run_one(engine, prompt, max_tokens=10, temperature=0.6, top_k=5, seed=1, logprobs=3, prompt_logprobs=2)
    tokens = result.tokens[0]
    oracle = plain_logprobs(tiny_llama_dir, prompt + tokens)
    for step, (own, *best) in enumerate(result.logprobs[0]):
        row = oracle[len(prompt) - 1 + step]
        assert own[0] == tokens[step]
        assert own[1] == pytest.approx(float(row[tokens[step]]), abs=1e-5)
        assert [value for _, value in best] == pytest.approx(row.topk(3).values.tolist(), abs=1e-5)
    assert result.prompt.logprobs[0] is result.prompt.top_logprobs[0] is None
    expected = [float(oracle[index - 1, token]) for index, token in enumerate(prompt) if index]
    assert result.prompt.logprobs[1:] == pytest.approx(expected, abs=1e-5)
    assert [len(best) for best in result.prompt.top_logprobs[1:]] == [2] * (len(prompt) - 1)


def test_no_new_tokens_gives_prompt_logprobs_only(engine):
    """A request with max_tokens 0 scores the prompt and samples nothing."""
    result = run_one(engine, PROMPTS[3], max_tokens=0, prompt_logprobs=0, num_samples=2)
    assert result.tokens == [[], []]
    assert result.reasons == [StopReason.LENGTH] * 2
    assert len(result.prompt.logprobs) == len(PROMPTS[3])
    assert result.prompt.top_logprobs is None


def test_spans_name_the_version_of_every_token(engine, adapters):
    """One span with the adapter's version covers all tokens; the base model has version 0."""
    params = SamplingParams(max_tokens=5, temperature=0, ignore_eos=True)
    results = run_all(engine, {'b': (PROMPTS[0], params, adapters[2]), 'base': (PROMPTS[0], params, None)})
    for name, version in (('b', adapters[2].version), ('base', 0)):
        (span,) = results[name].spans[0]
        assert (span.version, span.begin_token, span.end_token) == (version, 0, 5)


def test_stop_token_ends_after_min_tokens(engine):
    """The stop token is not sampled before min_tokens and ends the sequence afterwards."""
    unstopped = run_one(engine, PROMPTS[0], max_tokens=20, temperature=0, ignore_eos=True).tokens[0]
    stop = unstopped[4]
    early = run_one(engine, PROMPTS[0], max_tokens=20, temperature=0, ignore_eos=True, stop=[stop])
    assert early.tokens[0] == unstopped[: unstopped.index(stop) + 1]
    assert early.reasons == [StopReason.STOP]
    late = run_one(engine, PROMPTS[0], max_tokens=20, temperature=0, ignore_eos=True, stop=[stop], min_tokens=8)
    assert stop not in late.tokens[0][:8]


def test_stop_string_ends_the_text(engine, tokenizer):
    """The text ends before the stop string, and the last token completes the stop string."""
    unstopped = run_one(engine, PROMPTS[1], max_tokens=30, temperature=1.0, seed=3, ignore_eos=True)
    text = unstopped.texts[0]
    index = next(p for p in range(4, len(text) - 2) if '\ufffd' not in text[p : p + 2])
    stop = text[index : index + 2]
    result = run_one(engine, PROMPTS[1], max_tokens=30, temperature=1.0, seed=3, ignore_eos=True, stop=stop)
    assert result.texts[0] == text[: text.index(stop)]
    assert result.reasons == [StopReason.STOP]
    assert stop in tokenizer.decode(result.tokens[0])


def test_context_length_ends_a_sequence_without_max_tokens(model):
    """A sequence without max_tokens ends at the context length."""
    engine = make_engine(model, max_model_len=20)
    result = run_one(engine, PROMPTS[0], temperature=0, ignore_eos=True)
    assert len(result.tokens[0]) == 16
    assert result.reasons == [StopReason.LENGTH]


@settings(max_examples=15, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    plan=st.lists(
        st.tuples(st.integers(0, 4), st.integers(0, 8), st.integers(1, 3), st.sampled_from([None, 2])), max_size=8
    )
)
def test_joining_and_leaving_requests_do_not_affect_others(model, adapters, plan):
    """Requests that are added and aborted between steps do not change other requests' results."""
    engine = make_engine(model, max_sequences=4)
    results: dict[str, Gathered] = {}
    requests = {}
    for index, (prompt_index, max_tokens, count, leave_after) in enumerate(plan):
        request = (
            PROMPTS[prompt_index],
            SamplingParams(max_tokens=max_tokens, num_samples=count, seed=index),
            adapters[index % 3],
        )
        name = str(index)
        engine.add_request(name, request[0], request[1], adapter=request[2])
        results[name] = Gathered(count)
        for event in [event for _ in range(leave_after or 1) for event in engine.step()]:
            results[event.request_id].take(event)
        if leave_after and None in results[name].reasons:
            for event in engine.abort(name):
                results[name].take(event)
        elif None not in results[name].reasons or not leave_after:
            requests[name] = request
    drain(engine, results)
    assert all(None not in result.reasons for result in results.values())
    for name, request in requests.items():
        alone = run_all(make_engine(model), {name: request})[name]
        assert results[name].tokens == alone.tokens
        assert results[name].logprobs == alone.logprobs


def test_logprobs_are_never_positive_or_nan(engine):
    """The log-probability of every sampled token is a number of at most 0."""
    result = run_one(engine, PROMPTS[2], max_tokens=16, temperature=5.0, seed=2, logprobs=1)
    assert all(math.isfinite(value) and value <= 0 for entry in result.logprobs[0] for _, value in entry)
