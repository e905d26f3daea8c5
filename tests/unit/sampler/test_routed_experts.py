"""Experts of sampled tokens: the torch engine reports the experts that computed each token; a trainer replays them.

Legend: P tokens of a prompt, N sampled tokens, L layers with experts, A experts per token.
"""

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from fixtures.engine_runs import Gathered, drain, make_adapter, make_engine
from fixtures.mixture_model import CONFIG, build_mixture
from fixtures.tiny_model import build_tiny_tokenizer
from twinkle.data_format import LoraConfig, SamplingParams, StopReason
from twinkle.model.engine import ForwardOptions, TrainerEngine
from twinkle.nn import ExpertRouting, KVCache, PackedCausalLM, SequenceSpan
from twinkle.rollout import TokenTrack
from twinkle.sampler import InvalidSamplingParams, TorchSampler
from twinkle.sampler.engine import SequenceSoFar, TokenEvent
from twinkle.sampler.engine.routed_experts import record

SHAPE = (CONFIG.num_hidden_layers, CONFIG.num_experts_per_tok)
PROMPT = list(range(3, 43))
"""A prompt that the engine computes in several chunks."""
PARAMS = SamplingParams(max_tokens=6, seed=1, num_samples=2, ignore_eos=True, return_routed_experts=True)


@pytest.fixture(scope='module')
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a mixture of experts with a tokenizer."""
    return build_tiny_tokenizer(build_mixture(tmp_path_factory.mktemp('mixture')))


@pytest.fixture(scope='module')
def model(folder: Path) -> PackedCausalLM:
    """The mixture of experts."""
    return PackedCausalLM.load(folder)


def sampled(model: PackedCausalLM, params: SamplingParams = PARAMS, **options) -> tuple[Gathered, list]:
    """Run a request; return its results and the experts of each sequence."""
    engine, results, experts = make_engine(model), Gathered(params.num_samples), [None] * params.num_samples
    engine.add_request('it', PROMPT, params, **options)
    while not engine.is_idle:
        for event in engine.step():
            results.take(event)
            if isinstance(event, TokenEvent) and event.stop_reason is not None:
                experts[event.sequence_index] = event.routed_experts
    return results, experts


@torch.inference_mode()
def recomputed(model: PackedCausalLM, tokens: list[int]) -> np.ndarray:
    """Return the experts of tokens that are computed one at a time."""
    cache, found = KVCache(len(tokens)), []
    for position, token in enumerate(tokens):
        routing = ExpertRouting(model.routing)
        ids, positions = (torch.tensor([value]) for value in (token, position))
        model.hidden(ids, positions, sequences=[SequenceSpan(0, 1, cache)], adapters=[], routing=routing)
        found.append(routing.chosen(1).numpy())
    return np.concatenate(found)


def test_experts_are_those_of_the_computed_tokens(model):
    """Each sequence reports the experts of the prompt and of the sampled tokens except the last one."""
    results, experts = sampled(model)
    for tokens, own in zip(results.tokens, experts, strict=True):
        assert own.shape == (len(PROMPT) + len(tokens) - 1, *SHAPE)
        assert own.dtype == np.uint8
        assert np.array_equal(np.sort(own), np.sort(recomputed(model, [*PROMPT, *tokens[:-1]])))
    assert not np.array_equal(experts[0][len(PROMPT) :], experts[1][len(PROMPT) :])


def test_request_for_experts_does_not_change_samples(model):
    """Requests in one batch, with and without experts, get the same samples as a request without experts, bitwise."""
    adapter = make_adapter(model, 'a', 0)
    plain = SamplingParams(max_tokens=6, seed=1, num_samples=2, ignore_eos=True)
    alone, none = sampled(model, plain)
    assert none == [None, None]
    engine, results = make_engine(model), {name: Gathered(2) for name in ('with', 'without', 'adapter')}
    engine.add_request('with', PROMPT, PARAMS)
    engine.add_request('without', PROMPT, plain)
    engine.add_request('adapter', PROMPT, PARAMS, adapter=adapter)
    drain(engine, results)
    for name in ('with', 'without'):
        assert (results[name].tokens, results[name].logprobs) == (alone.tokens, alone.logprobs)
    assert results['adapter'].logprobs != alone.logprobs


@pytest.mark.parametrize('delivered', [0, 1, 3])
def test_continued_sequence_reports_all_experts(model, delivered):
    """A sequence that another engine began reports the same experts as an uninterrupted sequence."""
    params = SamplingParams(max_tokens=6, seed=1, ignore_eos=True, return_routed_experts=True)
    whole, expected = sampled(model, params)
    so_far = SequenceSoFar(token_ids=tuple(whole.tokens[0][:delivered]))
    rest, experts = sampled(model, params, continued=[so_far])
    assert whole.tokens[0] == [*so_far.token_ids, *rest.tokens[0]]
    assert np.array_equal(experts[0], expected[0])


def test_continued_sequence_that_had_ended_reports_its_experts(model):
    """If all tokens of a sequence were delivered but not its end, its end has the experts of all its tokens."""
    whole, expected = sampled(model)
    delivered = [SequenceSoFar(token_ids=tuple(tokens)) for tokens in whole.tokens]
    rest, experts = sampled(model, continued=delivered)
    assert rest.tokens == [[], []]
    assert rest.reasons == whole.reasons
    assert rest.spans == whole.spans
    assert all(map(np.array_equal, experts, expected))
    _, (none, last) = sampled(model, continued=[replace(delivered[0], is_finished=True), delivered[1]])
    assert none is None
    assert np.array_equal(last, expected[1])


def test_records_do_not_keep_other_rows_in_memory():
    """The recorded experts of a request share no memory with those of the step's other rows."""
    items = [SimpleNamespace(request=SimpleNamespace(params=PARAMS), experts=[]) for _ in range(2)]
    routing = SimpleNamespace(chosen=lambda count: torch.zeros(count, *SHAPE, dtype=torch.uint8))
    record(items, [range(3), range(3, 4)], routing)
    assert [item.experts[0].shape for item in items] == [(3, *SHAPE), (1, *SHAPE)]
    assert all(item.experts[0].base is None for item in items)


def test_scored_prompt_reports_its_experts(model):
    """A request without new tokens reports the experts of all tokens of the prompt."""
    params = SamplingParams(max_tokens=0, prompt_logprobs=0, return_routed_experts=True)
    _, (experts,) = sampled(model, params)
    assert experts.shape == (len(PROMPT), *SHAPE)


def test_aborted_sequence_reports_no_experts(model):
    """The end event of an aborted sequence contains no experts."""
    engine = make_engine(model)
    engine.add_request('it', PROMPT, PARAMS)
    for _ in range(5):
        engine.step()
    assert [(event.stop_reason, event.routed_experts) for event in engine.abort('it')] == [(StopReason.ABORT, None)] * 2


def test_dense_model_refuses_to_report_experts(tiny_llama_dir):
    """The error of a model without experts names the parameter."""
    engine = make_engine(PackedCausalLM.load(tiny_llama_dir))
    with pytest.raises(InvalidSamplingParams, match='return_routed_experts'):
        engine.add_request('it', PROMPT, PARAMS)
    assert engine.is_idle


def test_trainer_replays_the_experts_of_samples(folder, model):
    """The trainer's pass uses the experts in a sampler's feature, although the trainer's routers differ."""
    params = {'max_tokens': 5, 'seed': 1, 'ignore_eos': True, 'return_routed_experts': True}
    (response,) = TorchSampler(str(folder), model=model).sample(PROMPT, params)
    feature = response.sequences[0].new_input_feature
    given = feature['routed_experts']
    trainer = TrainerEngine(PackedCausalLM.load(folder))
    trainer.create_adapter('a', LoraConfig(r=4, seed=1))
    for name, weight in trainer.model.base_parameters.items():
        if name.endswith('mlp.gate.weight'):
            weight.data += torch.randn(weight.shape, generator=torch.Generator().manual_seed(4))
    recorded = ForwardOptions(more_outputs=('routed_experts',))
    output = trainer.forward_backward('a', [feature], options=recorded)
    assert np.array_equal(output.outputs['routed_experts'][0][: len(given)], given)
    free = {name: value for name, value in feature.items() if name != 'routed_experts'}
    other = trainer.forward_only('a', [free], options=recorded).outputs['routed_experts'][0]
    assert not np.array_equal(other[: len(given)], given)


def test_turns_keep_the_experts_with_which_they_were_sampled(folder, model):
    """The experts of earlier turns are kept when a chat continues, by features and by tracks of a rollout."""
    sampler = TorchSampler(str(folder), model=model)
    params = {'max_tokens': 4, 'seed': 1, 'ignore_eos': True, 'return_routed_experts': True}
    track, feature = TokenTrack.of_prompt(PROMPT), {'input_ids': PROMPT}
    for turn in range(2):
        sequence = sampler.sample(feature, params)[0].sequences[0]
        sequence.routed_experts[:] = [turn, turn + 2]  # Marks the turn.
        track = track.with_sampled(sequence).with_unsampled([9, 8])
        feature = track.feature()
    first = len(PROMPT) + 3
    assert feature['routed_experts'][:first, 0].tolist() == [[0, 2]] * first
    assert feature['routed_experts'][first:, 0].tolist() == [[1, 3]] * (2 + 1 + 3)
    continued = sampler.sample(feature, params)[0].sequences[0].new_input_feature
    assert np.array_equal(continued['routed_experts'][: len(feature['routed_experts'])], feature['routed_experts'])
