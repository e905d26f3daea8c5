"""The real SDK samples from base models and trained models, with named and unnamed weights and pickled clients."""

import base64
import json
import math
import pickle
from pathlib import Path

import numpy as np
import pytest
import tinker

from fixtures.tinker_sdk import (
    SDK_MARKS,
    new_model,
    run_program,
    scores,
    sdk_address,
    service_client,
    tokens_of,
    train,
)
from fixtures.tiny_model import MAX_POSITIONS
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS

PROMPT = tokens_of(5, 8)
EXAMPLES = [tokens_of(seed) for seed in range(3)]
ENDLESS: list[str] = []
"""Empty list of stops, with which not even the end-of-sequence token ends a sequence."""


def prompt_of(tokens: list[int]) -> tinker.ModelInput:
    return tinker.ModelInput.from_ints(tokens)


def draw(client: tinker.SamplingClient, count: int = 1, tokens: list[int] | None = None, **options):
    """Return the response to a request for a few tokens; `options` are sampling parameters."""
    params = tinker.SamplingParams(**{'max_tokens': 6, 'stop': ENDLESS, **options})
    return client.sample(prompt_of(tokens or PROMPT), count, params).result()


def far_model(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """Return a model that differs clearly from its base model."""
    model = new_model(service, stack)
    train(model, *EXAMPLES, steps=4)
    return model


@pytest.fixture(scope='module')
def trained(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A trained model that no test changes."""
    return far_model(service, stack)


@pytest.fixture
def training(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A trained model for tests that train it further."""
    return far_model(service, stack)


@pytest.fixture(scope='module')
def named(service: tinker.ServiceClient, trained: tinker.TrainingClient) -> tinker.SamplingClient:
    """A sampler of the trained model's weights, saved under a name."""
    path = trained.save_weights_for_sampler('steady').result().path
    assert path == f'tinker://{trained.model_id}/sampler_weights/steady'
    return service.create_sampling_client(model_path=path).result()


@pytest.fixture(scope='module')
def base(service: tinker.ServiceClient, stack: StackState) -> tinker.SamplingClient:
    """A sampler of the base model."""
    return service.create_sampling_client(base_model=stack.base_model).result()


def test_sampler_scores_as_the_trainer_does(
    named: tinker.SamplingClient, base: tinker.SamplingClient, trained: tinker.TrainingClient
) -> None:
    """Prompt log-probabilities equal the trainer's within 1e-4, and differ from those of the base model."""
    expected = np.split(scores(trained, *EXAMPLES), len(EXAMPLES))
    for tokens, own in zip(EXAMPLES, expected, strict=True):
        scored = named.compute_logprobs(prompt_of(tokens)).result()
        assert scored[0] is None
        np.testing.assert_allclose(scored[1:], own, atol=1e-4)
        assert np.abs(np.array(base.compute_logprobs(prompt_of(tokens)).result()[1:]) - own).max() > 0.01


def test_sampled_tokens_have_the_logprobs_of_the_trainer(
    named: tinker.SamplingClient, trained: tinker.TrainingClient
) -> None:
    """Sampled tokens have the log-probabilities that the trainer computes for them, within 1e-4."""
    sequence = draw(named, seed=3).sequences[0]
    assert len(sequence.tokens) == len(sequence.logprobs) == 6
    assert sequence.stop_reason == 'length'
    own = scores(trained, [*PROMPT, *sequence.tokens])[len(PROMPT) - 1 :]
    np.testing.assert_allclose(sequence.logprobs, own, atol=1e-4)


def test_weights_without_a_name_do_not_change(training: tinker.TrainingClient) -> None:
    """A snapshot client still samples the saved weights after further training."""
    first = training.save_weights_and_get_sampling_client().result()
    before = scores(training, PROMPT)
    train(training, *EXAMPLES)
    second = training.save_weights_and_get_sampling_client().result()
    after = scores(training, PROMPT)
    assert np.abs(before - after).max() > 1e-3
    np.testing.assert_allclose(first.compute_logprobs(prompt_of(PROMPT)).result()[1:], before, atol=1e-4)
    np.testing.assert_allclose(second.compute_logprobs(prompt_of(PROMPT)).result()[1:], after, atol=1e-4)


def test_inflight_clients_follow_the_model(training: tinker.TrainingClient) -> None:
    """Older in-flight clients of a model sample its newest saved weights."""
    first = training.save_weights_and_get_sampling_client(kind='inflight').result()
    before = scores(training, PROMPT)
    np.testing.assert_allclose(first.compute_logprobs(prompt_of(PROMPT)).result()[1:], before, atol=1e-4)
    train(training, *EXAMPLES)
    training.save_weights_and_get_sampling_client(kind='inflight').result()
    now = first.compute_logprobs(prompt_of(PROMPT)).result()[1:]
    np.testing.assert_allclose(now, scores(training, PROMPT), atol=1e-4)


def test_seed_repeats_and_several_samples_differ(named: tinker.SamplingClient) -> None:
    """Requests with the same seed give the same samples, and the samples of one request differ from each other."""
    first, again, other = (draw(named, 4, seed=seed) for seed in (3, 3, 4))
    tokens = [[tuple(sequence.tokens) for sequence in answer.sequences] for answer in (first, again, other)]
    assert tokens[0] == tokens[1] != tokens[2]
    assert len(set(tokens[0])) == 4


def test_greedy_selects_the_most_likely(named: tinker.SamplingClient) -> None:
    """Temperature 0 and top-k 1 always select the most likely token."""
    greedy = draw(named, 2, temperature=0.0).sequences
    one = draw(named, top_k=1, seed=1).sequences[0]
    assert greedy[0].tokens == greedy[1].tokens == one.tokens
    params = tinker.SamplingParams(max_tokens=6, stop=ENDLESS, temperature=0.0)
    told = named.sample(prompt_of(PROMPT), 1, params, topk_sample_logprobs=3).result().sequences[0]
    tops = [[token for token, _ in row] for row in told.topk_logprobs]
    assert [row[0] for row in tops] == told.tokens
    assert all(len(row) == 3 for row in tops)


@pytest.mark.usefixtures('local_tokenizer')
def test_stop_is_the_last_part_of_a_sequence(named: tinker.SamplingClient, trained: tinker.TrainingClient) -> None:
    """A stop token or stop string ends the sequence and is its last part."""
    tokens = draw(named, temperature=0.0).sequences[0].tokens
    index = next(place for place, token in enumerate(tokens) if token not in tokens[:place] and place > 0)
    by_token = draw(named, temperature=0.0, stop=[tokens[index]]).sequences[0]
    assert by_token.tokens == tokens[: index + 1]
    assert by_token.stop_reason == 'stop'
    assert len(by_token.logprobs) == index + 1
    tokenizer = trained.get_tokenizer()
    text = tokenizer.decode([tokens[0]])
    if '\ufffd' not in text:
        by_text = draw(named, temperature=0.0, stop=[text]).sequences[0]
        assert (by_text.tokens, by_text.stop_reason) == (tokens[:1], 'stop')


def test_prompt_logprobs_include_the_most_likely_tokens(named: tinker.SamplingClient) -> None:
    """Each position of the prompt except the first has its log-probability and the top k tokens."""
    params = tinker.SamplingParams(max_tokens=1)
    answer = named.sample(prompt_of(PROMPT), 1, params, include_prompt_logprobs=True, topk_prompt_logprobs=2).result()
    scored = named.compute_logprobs(prompt_of(PROMPT)).result()
    assert answer.prompt_logprobs[0] is None
    np.testing.assert_allclose(answer.prompt_logprobs[1:], scored[1:], atol=1e-5)
    assert len(answer.topk_prompt_logprobs) == len(PROMPT)
    for row, own in zip(answer.topk_prompt_logprobs[1:], answer.prompt_logprobs[1:], strict=True):
        values = [value for _, value in row]
        assert values == sorted(values, reverse=True)
        assert values[0] >= own - 1e-5


def test_logprobs_belong_to_the_tempered_distribution(named: tinker.SamplingClient) -> None:
    """Log-probabilities at a low temperature are finite, and on average larger than at temperature 1."""
    cold, plain = (draw(named, temperature=value, seed=1).sequences[0] for value in (0.2, 1.0))
    assert np.mean(cold.logprobs) > np.mean(plain.logprobs)
    assert all(value <= 0 and math.isfinite(value) for value in cold.logprobs)


def test_sixty_four_concurrent_requests_are_independent(named: tinker.SamplingClient) -> None:
    """64 concurrent requests complete; the first and the last get the same responses as alone."""
    params = [tinker.SamplingParams(max_tokens=4, stop=ENDLESS, seed=seed) for seed in range(64)]
    futures = [named.sample(prompt_of(tokens_of(seed, 6)), 1, given) for seed, given in enumerate(params)]
    answers = [future.result().sequences[0].tokens for future in futures]
    alone = [draw(named, tokens=tokens_of(seed, 6), max_tokens=4, seed=seed).sequences[0].tokens for seed in (0, 63)]
    assert [answers[0], answers[63]] == alone
    assert all(len(tokens) == 4 for tokens in answers)


def test_client_is_pickled_into_another_process(
    named: tinker.SamplingClient, stack: StackState, tmp_path: Path
) -> None:
    """A pickled client in another process samples the same tokens as the original client."""
    (tmp_path / 'client.pickle').write_bytes(pickle.dumps(named))
    program = (
        'import os, pickle, sys, tinker\n'
        'client = pickle.load(open(sys.argv[1], "rb"))\n'
        'prompt = tinker.ModelInput.from_ints([int(word) for word in sys.argv[2:]])\n'
        'params = tinker.SamplingParams(max_tokens=6, stop=[], seed=3)\n'
        'print(client.sample(prompt, 1, params).result().sequences[0].tokens, flush=True)\n'
        # CPython 3.11 may abort at exit while threads of the SDK run.
        'os._exit(0)\n'
    )
    command = ['-c', program, str(tmp_path / 'client.pickle'), *map(str, PROMPT)]
    done = run_program(command, stack, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == str(draw(named, seed=3).sequences[0].tokens)


def test_sampler_is_known_by_its_handle(
    named: tinker.SamplingClient, trained: tinker.TrainingClient, rest: tinker.RestClient, stack: StackState
) -> None:
    """A client that is created from a handle samples the same tokens, and the API shows its path and base model."""
    key = sdk_address(stack)['api_key']
    again = tinker.SamplingClient.from_sampler_handle(named.get_sampler_handle(), api_key=key)
    assert draw(again, seed=3).sequences[0].tokens == draw(named, seed=3).sequences[0].tokens
    assert again.get_base_model() == stack.base_model
    handle = json.loads(base64.urlsafe_b64decode(named.get_sampler_handle()))
    told = rest.get_sampler(handle['sampling_session_id']).result()
    assert (told.base_model, told.model_path) == (
        stack.base_model,
        f'tinker://{trained.model_id}/sampler_weights/steady',
    )
    again.holder.close()


def test_wrong_requests_are_refused_immediately(
    service: tinker.ServiceClient, named: tinker.SamplingClient, trained: tinker.TrainingClient
) -> None:
    """Invalid prompts or temperatures and unsuitable weights are bad requests; missing weights are not found."""
    with pytest.raises(tinker.BadRequestError):
        draw(named, tokens=[3] * (MAX_POSITIONS - 2))
    with pytest.raises(tinker.BadRequestError):
        draw(named, tokens=[1 << 20])
    with pytest.raises(tinker.BadRequestError):
        draw(named, temperature=-1.0)
    with pytest.raises(tinker.BadRequestError):
        service.create_sampling_client(model_path=trained.save_state('no').result().path).result()
    with pytest.raises(tinker.NotFoundError):
        service.create_sampling_client(model_path='tinker://no:train:0/sampler_weights/no').result()
    with pytest.raises(tinker.BadRequestError):
        service.create_sampling_client(base_model='no/such-model').result()


def test_session_of_another_client_samples_saved_weights(
    named: tinker.SamplingClient, trained: tinker.TrainingClient, stack: StackState
) -> None:
    """A client in another session samples the same tokens from weights that were saved with a name."""
    with service_client(stack) as other:
        path = f'tinker://{trained.model_id}/sampler_weights/steady'
        client = other.create_sampling_client(model_path=path).result()
        assert draw(client, seed=3).sequences[0].tokens == draw(named, seed=3).sequences[0].tokens
