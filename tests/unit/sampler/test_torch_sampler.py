"""Unit tests of `TorchSampler`."""

from pathlib import Path

import numpy as np
import pytest
import torch

from twinkle.data_format import LoraConfig, SamplingParams, StopReason
from twinkle.infra import DeviceMesh, NotSupportedYet
from twinkle.nn import LoraWeights, PackedCausalLM, save_adapter
from twinkle.sampler import (
    ContextExceeded,
    InvalidSamplingParams,
    Sampler,
    TorchSampler,
    UnknownAdapter,
    vLLMSampler,
)

CHAT = {'messages': [{'role': 'user', 'content': 'Hi'}], 'user_data': [('answer', '"42"')]}
GREEDY = SamplingParams(max_tokens=6, temperature=0, ignore_eos=True)


@pytest.fixture(scope='module')
def sampler(tiny_llama_dir: Path) -> TorchSampler:
    """A sampler of the tiny model."""
    return TorchSampler(str(tiny_llama_dir), engine_args={'max_num_seqs': 4})


@pytest.fixture
def adapter_dir(tiny_llama_dir: Path, tmp_path: Path) -> Path:
    """A PEFT folder with an adapter that changes the sampled tokens."""
    model = PackedCausalLM.load(tiny_llama_dir)
    weights = LoraWeights.create(model.layers, LoraConfig(r=4, seed=1), seed=1)
    for factors in weights.factors.values():
        factors.b.copy_(0.3 * torch.randn(factors.b.shape, generator=torch.Generator().manual_seed(2)))
    save_adapter(weights, tmp_path / 'adapter', base_model='tiny')
    return tmp_path / 'adapter'


def test_chats_features_and_tokens_are_equivalent(sampler):
    """A chat, its feature and its tokens give the same completion; results are in input order."""
    feature = sampler.encode_trajectory(CHAT)
    tokens = [int(token) for token in feature['input_ids']]
    by_chat, by_feature, by_tokens, other = sampler.sample([CHAT, feature, tokens, [9]], GREEDY)
    assert by_chat.prompt_token_ids == by_feature.prompt_token_ids == by_tokens.prompt_token_ids == tokens
    assert by_chat.sequences[0].tokens == by_feature.sequences[0].tokens == by_tokens.sequences[0].tokens
    assert other.prompt_token_ids == [9]
    assert sampler.sample(tokens, GREEDY)[0].sequences[0].tokens == by_tokens.sequences[0].tokens


def test_new_input_feature_trains_on_the_completion_only(sampler):
    """Labels and old_logps of the returned feature cover the new tokens, and its messages include the new turn."""
    (response,) = sampler.sample(CHAT, {'max_tokens': 5, 'seed': 1, 'ignore_eos': True})
    (sequence,) = response.sequences
    feature, count = sequence.new_input_feature, len(response.prompt_token_ids)
    ids, labels = list(feature['input_ids']), list(feature['labels'])
    assert ids == response.prompt_token_ids + sequence.tokens
    assert labels == [-100] * (count - 1) + sequence.tokens + [-100]
    expected = [entry[0][1] for entry in sequence.logprobs]
    np.testing.assert_allclose(feature['old_logps'][count - 1 : -1], expected, rtol=1e-6)
    assert list(feature['completion_mask']) == [0] * count + [1] * 5
    assert feature['messages'][-1] == {'role': 'assistant', 'content': sequence.decoded}
    assert feature['user_data'] == [('answer', '"42"')]


def test_num_samples_overrides_the_params(sampler):
    """The argument `num_samples` takes precedence over the sampling parameters."""
    responses = sampler.sample([[5], [6]], SamplingParams(max_tokens=3, seed=1), num_samples=6)
    assert [len(response.sequences) for response in responses] == [6, 6]
    assert all(seq.stop_reason is not StopReason.ERROR for response in responses for seq in response.sequences)


def test_adapter_folder_is_sampled_and_versions_count(sampler, adapter_dir):
    """Adding an adapter again creates a new version and does not affect the base model."""
    base = sampler.sample([5, 6, 7], GREEDY)[0].sequences[0]
    sampler.add_adapter_to_sampler('mine', adapter_dir)
    first = sampler.sample([5, 6, 7], GREEDY, 'mine')[0].sequences[0]
    sampler.add_adapter_to_sampler('mine', LoraConfig(r=2))
    fresh = sampler.sample([5, 6, 7], GREEDY, 'mine')[0].sequences[0]
    assert first.tokens != base.tokens == fresh.tokens
    assert [seq.version_spans[0].version for seq in (base, first, fresh)] == [0, 1, 2]


def test_unknown_adapter_is_refused(sampler):
    """An unknown adapter raises UnknownAdapter instead of using the base model."""
    with pytest.raises(UnknownAdapter):
        sampler.sample([5], GREEDY, 'nobody')


def test_no_new_tokens_scores_the_prompt(sampler):
    """A call with max_tokens 0 returns the prompt's log-probabilities even without `prompt_logprobs`."""
    (response,) = sampler.sample([5, 6, 7], SamplingParams(max_tokens=0))
    assert response.sequences[0].tokens == []
    assert response.prompt_logprobs[0] is None
    assert all(value < 0 for value in response.prompt_logprobs[1:])


def test_refused_batch_leaves_the_sampler_usable(sampler):
    """One invalid input refuses the whole batch, and the sampler remains usable."""
    with pytest.raises(ContextExceeded):
        sampler.sample([[5], [1] * 600], SamplingParams(max_tokens=3))
    with pytest.raises(InvalidSamplingParams):
        sampler.sample([5], SamplingParams(max_tokens=3, min_tokens=4))
    with pytest.raises(ValueError, match='inputs'):
        sampler.sample([])
    assert len(sampler.sample([5], GREEDY)) == 1


def test_stream_equals_sample_and_can_be_closed_early(sampler):
    """A stream gives the tokens of `sample` one at a time; closing it early frees the request."""
    expected = sampler.sample([5, 6], GREEDY)[0].sequences[0]
    events = list(sampler.sample_stream([5, 6], GREEDY))
    assert [token for event in events for token in event.tokens] == expected.tokens
    assert ''.join(event.text for event in events) == expected.decoded
    stream = sampler.sample_stream([5, 6], GREEDY)
    next(stream)
    stream.close()
    assert sampler.sample([5, 6], GREEDY)[0].sequences[0].tokens == expected.tokens


def test_streams_may_be_read_alternately(sampler):
    """Two streams that are read alternately each get their own tokens."""
    alone = [sampler.sample([token], GREEDY)[0].sequences[0].tokens for token in (5, 9)]
    streams = [sampler.sample_stream([token], GREEDY) for token in (5, 9)]
    pairs = zip(*streams, strict=True)
    together = [[token for event in events for token in event.tokens] for events in zip(*pairs, strict=True)]
    assert together == alone


def test_unknown_engine_arguments_are_refused(tiny_llama_dir):
    """Unsupported engine arguments raise ValueError instead of being ignored."""
    with pytest.raises(ValueError, match='gpu_memory_utilization'):
        TorchSampler(str(tiny_llama_dir), engine_args={'gpu_memory_utilization': 0.5})
    with pytest.raises(NotSupportedYet):
        TorchSampler(str(tiny_llama_dir), device_mesh=DeviceMesh.from_sizes(world_size=2, dp_size=2))


def test_a_model_on_another_device_is_refused(tiny_llama_dir):
    """A given model that is not on the requested device raises ValueError."""
    model = PackedCausalLM.load(tiny_llama_dir)
    with pytest.raises(ValueError, match='meta'):
        TorchSampler(str(tiny_llama_dir), model=model, device='meta')
    assert TorchSampler(str(tiny_llama_dir), model=model, device='cpu', remote_group='default').model_id


def test_both_samplers_implement_the_interface():
    """`TorchSampler` and `vLLMSampler` implement the common sampler interface."""
    assert issubclass(TorchSampler, Sampler)
    assert issubclass(vLLMSampler, Sampler)
