"""Training features from samples are the same for the library's sampler and for the sampler service."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle.data_format import SampledSequence, SampleResponse
from twinkle.sampler import TorchSampler
from twinkle_client.convert.features import features_to_proto
from twinkle_client.sampler.results import sample_response
from twinkle_services.sampler.api.convert_responses import completed_to_proto
from twinkle_services.sampler.application.batch import CompletedPrompt, CompletedSequence
from twinkle_services.sampler.domain.generation import PromptComputed

CHAT = {
    'messages': [
        {'role': 'user', 'content': 'hi'},
        {'role': 'assistant', 'content': 'hello'},
        {'role': 'user', 'content': 'how are you'},
    ],
    'user_data': [('answer', '"42"')],
}
PARAMS = {'max_tokens': 5, 'seed': 1, 'ignore_eos': True, 'logprobs': 2}
STREAMS = ('input_ids', 'labels', 'completion_mask', 'old_logps')


@pytest.fixture(scope='module')
def sampler(tiny_llama_dir: Path) -> TorchSampler:
    """A sampler of the library."""
    return TorchSampler(str(tiny_llama_dir))


def converted_by_the_service(response: SampleResponse, prompt: Any) -> SampleResponse:
    """Return the response that a client would receive from a service that sampled the same tokens."""
    completed = CompletedPrompt(
        prompt_index=0,
        prompt=PromptComputed(token_ids=tuple(response.prompt_token_ids)),
        sequences=[
            CompletedSequence(
                stop_reason=sequence.stop_reason,
                tokens=sequence.tokens,
                logprobs=sequence.logprobs,
                text=sequence.decoded,
                version_spans=sequence.version_spans,
            )
            for sequence in response.sequences
        ],
    )
    return sample_response(completed_to_proto(completed), prompt=prompt)


def check_same(local: SampledSequence, remote: SampledSequence) -> None:
    """Compare all fields that a training loop reads."""
    assert (local.tokens, local.decoded, local.stop_reason) == (remote.tokens, remote.decoded, remote.stop_reason)
    assert local.version_spans == remote.version_spans
    for one, other in zip(local.logprobs, remote.logprobs, strict=True):
        assert [token for token, _ in one] == [token for token, _ in other]
        assert [value for _, value in one] == pytest.approx([value for _, value in other], rel=1e-6)
    for name in STREAMS:
        np.testing.assert_array_equal(local.new_input_feature[name], remote.new_input_feature[name], err_msg=name)
        assert np.asarray(local.new_input_feature[name]).dtype == np.asarray(remote.new_input_feature[name]).dtype
    for name in ('messages', 'user_data'):
        assert local.new_input_feature.get(name) == remote.new_input_feature.get(name)


@pytest.mark.parametrize('prompt', [CHAT, [5, 6, 7]], ids=['chat', 'tokens'])
def test_features_are_the_same_from_both(sampler, prompt):
    """Both samplers give equal tokens, labels, masks and log-probabilities at the same positions."""
    (response,) = sampler.sample([prompt], PARAMS, num_samples=2)
    for local, remote in zip(response.sequences, converted_by_the_service(response, prompt).sequences, strict=True):
        check_same(local, remote)


def test_second_turn_keeps_the_feature_of_the_first_turn(sampler):
    """A feature that is sampled from a second time keeps the first turn's tokens, labels and log-probabilities."""
    first = sampler.sample([[5, 6, 7]], PARAMS)[0].sequences[0]
    (response,) = sampler.sample([first.new_input_feature], PARAMS)
    (second,) = response.sequences
    check_same(second, converted_by_the_service(response, first.new_input_feature).sequences[0])
    feature = second.new_input_feature
    assert list(feature['input_ids']) == [5, 6, 7, *first.tokens, *second.tokens]
    labeled = np.flatnonzero(np.asarray(feature['labels']) != -100)
    assert list(np.asarray(feature['labels'])[labeled]) == [*first.tokens, *second.tokens]
    sampled = [row[0][1] for row in (*first.logprobs, *second.logprobs)]
    np.testing.assert_allclose(np.asarray(feature['old_logps'])[labeled], sampled, rtol=1e-6)


def test_logprobs_can_be_passed_to_the_trainer(sampler):
    """`logprobs` as the argument `old_logps` gives the same message as the feature's log-probabilities."""
    (response,) = sampler.sample([CHAT], PARAMS)
    (sequence,) = converted_by_the_service(response, CHAT).sequences
    own = features_to_proto([sequence.new_input_feature])
    passed = features_to_proto([sequence.new_input_feature], per_label={'old_logps': [sequence.logprobs]})
    assert own.features[0].old_logps.data == passed.features[0].old_logps.data
