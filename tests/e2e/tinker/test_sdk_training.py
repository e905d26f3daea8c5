"""The real SDK trains a tiny model: results, order of operations, and errors."""

import grpc
import numpy as np
import pytest
import tinker

from fixtures.tinker_sdk import (
    ADAM,
    SDK_MARKS,
    datum,
    logprobs_of,
    new_model,
    rest_client,
    scores,
    service_client,
    tokens_of,
    train,
    weighted,
)
from fixtures.tiny_model import MAX_POSITIONS, VOCAB_SIZE
from twinkle.api.gateway.v1 import session_service_pb2, session_service_pb2_grpc
from twinkle_client.stack import StackState

pytestmark = SDK_MARKS
EXAMPLES = [tokens_of(seed) for seed in range(3)]


@pytest.fixture
def model(service: tinker.ServiceClient, stack: StackState) -> tinker.TrainingClient:
    """A new model."""
    return new_model(service, stack)


def test_capabilities_list_the_served_models(rest: tinker.RestClient, stack: StackState) -> None:
    """A client without a session lists the base model with its context and capabilities."""
    served = rest.get_server_capabilities().result().supported_models
    assert [(item.model_name, item.max_context_length) for item in served] == [(stack.base_model, MAX_POSITIONS)]
    assert (served[0].trainable, served[0].sampleable) == (True, True)


@pytest.mark.usefixtures('local_tokenizer')
def test_model_shows_its_facts(service: tinker.ServiceClient, stack: StackState) -> None:
    """A model's id starts with its session's id; its info has the base model, the rank and the tokenizer's id."""
    model = new_model(service, stack, rank=4)
    info = model.get_info()
    assert model.model_id.startswith(f'{service.holder.get_session_id()}:train:')
    assert (info.model_data.model_name, info.is_lora, info.lora_rank) == (stack.base_model, True, 4)
    assert info.model_data.tokenizer_id == stack.base_model
    tokenizer = model.get_tokenizer()
    assert tokenizer.decode(tokenizer.encode('Twinkle')) == 'Twinkle'


@pytest.mark.parametrize(
    'options',
    [{'seed': 8}, {'rank': 4}, {'train_mlp': False}, {'train_attn': False}],
    ids=str,
)
def test_lora_has_the_requested_configuration(
    service: tinker.ServiceClient, stack: StackState, model: tinker.TrainingClient, options: dict[str, int]
) -> None:
    """Equal options train bitwise equally; another seed, rank or choice of layers changes the result."""
    same, other = new_model(service, stack), new_model(service, stack, **options)
    np.testing.assert_array_equal(scores(same, *EXAMPLES), scores(other, *EXAMPLES))
    for each in (model, same, other):
        train(each, *EXAMPLES)
    np.testing.assert_array_equal(scores(model, *EXAMPLES), scores(same, *EXAMPLES))
    assert np.abs(scores(model, *EXAMPLES) - scores(other, *EXAMPLES)).max() > 1e-6


def test_loss_is_the_weighted_sum_and_falls(model: tinker.TrainingClient) -> None:
    """`loss:sum` is the negated weighted sum of the returned log-probabilities, and steps reduce this sum."""
    weights = [[0.5, -0.25, *[1.0] * 10], [0.0] * 12, [2.0] * 12]
    data = [weighted(tokens, given) for tokens, given in zip(EXAMPLES, weights, strict=True)]
    output = model.forward(data, 'cross_entropy').result()
    expected = -sum(np.dot(lp, given) for lp, given in zip(logprobs_of(output), weights, strict=True))
    assert output.metrics['loss:sum'] == pytest.approx(expected, rel=1e-5)
    assert all((lp < 0).all() for lp in logprobs_of(output))
    losses = train(model, *EXAMPLES, steps=6)
    assert losses[-1] < 0.8 * losses[0]


def test_forward_has_the_results_of_forward_backward(model: tinker.TrainingClient) -> None:
    """A forward pass returns log-probabilities and a loss bitwise equal to those of `forward_backward`."""
    train(model, *EXAMPLES)
    data = [weighted(tokens) for tokens in EXAMPLES]
    before = model.forward(data, 'cross_entropy').result()
    both = model.forward_backward(data, 'cross_entropy').result()
    np.testing.assert_array_equal(np.concatenate(logprobs_of(before)), np.concatenate(logprobs_of(both)))
    assert before.metrics['loss:sum'] == both.metrics['loss:sum']


def test_passes_before_a_step_add_up(service: tinker.ServiceClient, stack: StackState) -> None:
    """Several `forward_backward` calls before a step train like one call with all their examples, within 1e-4."""
    one, two = new_model(service, stack), new_model(service, stack)
    train(one, *EXAMPLES)
    for tokens in EXAMPLES:
        two.forward_backward([weighted(tokens)], 'cross_entropy').result()
    two.optim_step(ADAM).result()
    np.testing.assert_allclose(scores(one, *EXAMPLES), scores(two, *EXAMPLES), atol=1e-4)


def test_steps_may_be_pipelined(service: tinker.ServiceClient, stack: StackState) -> None:
    """Four pipelined steps give bitwise the same weights as sequential steps."""
    patient, hasty = new_model(service, stack), new_model(service, stack)
    expected = train(patient, *EXAMPLES, steps=4)
    data = [weighted(tokens) for tokens in EXAMPLES]
    sent = [(hasty.forward_backward(data, 'cross_entropy'), hasty.optim_step(ADAM)) for _ in range(4)]
    assert [both.result().metrics['loss:sum'] for both, _ in sent] == expected
    np.testing.assert_array_equal(scores(patient, *EXAMPLES), scores(hasty, *EXAMPLES))


def test_chunks_may_arrive_in_any_order(model: tinker.TrainingClient) -> None:
    """If the SDK splits a batch into several requests, its results have the order of the batch.

    `loss:sum` and `num_tokens:sum` are sums over all requests.
    """
    count = 2050
    data = [weighted([3 + index % 200, 5, 7]) for index in range(count)]
    output = model.forward_backward(data, 'cross_entropy').result()
    assert len(output.loss_fn_outputs) == count
    logprobs = np.stack(logprobs_of(output))
    np.testing.assert_allclose(logprobs[:200], logprobs[1800:2000], atol=1e-4)
    assert len(np.unique(logprobs[:200, 0])) > 100
    assert output.metrics['loss:sum'] == pytest.approx(-logprobs.sum(), rel=1e-4)
    assert output.metrics['num_tokens:sum'] == 2 * count
    model.optim_step(ADAM).result()
    assert scores(model, EXAMPLES[0]).shape == (12,)


def test_saved_state_continues_bitwise(service: tinker.ServiceClient, model: tinker.TrainingClient) -> None:
    """A model that is loaded with its optimizer takes bitwise the same steps; without it, the optimizer is new."""
    train(model, *EXAMPLES, steps=2)
    path = model.save_state('second').result().path
    assert path == f'tinker://{model.model_id}/weights/second'
    resumed = service.create_training_client_from_state_with_optimizer(path).result()
    fresh = service.create_training_client_from_state(path).result()
    np.testing.assert_array_equal(scores(resumed, *EXAMPLES), scores(model, *EXAMPLES))
    np.testing.assert_array_equal(scores(fresh, *EXAMPLES), scores(model, *EXAMPLES))
    assert train(resumed, *EXAMPLES, steps=2) == train(model, *EXAMPLES, steps=2)
    np.testing.assert_array_equal(scores(resumed, *EXAMPLES), scores(model, *EXAMPLES))
    train(fresh, *EXAMPLES, steps=2)
    assert np.abs(scores(fresh, *EXAMPLES) - scores(model, *EXAMPLES)).max() > 1e-4
    assert resumed.get_info().lora_rank == 8


def test_saved_name_is_replaced_only_on_request(model: tinker.TrainingClient) -> None:
    """A name can be saved once, unless overwriting is requested."""
    model.save_state('only').result()
    with pytest.raises(tinker.RequestFailedError) as refused:
        model.save_state('only').result()
    assert refused.value.category == 'user'
    assert model.save_state('only', overwrite=True, ttl_seconds=3600).result().path.endswith('/weights/only')


def test_wrong_requests_are_refused_immediately(
    service: tinker.ServiceClient, stack: StackState, model: tinker.TrainingClient
) -> None:
    """Invalid requests raise `BadRequestError`, and the model can still be trained afterwards."""
    with pytest.raises(tinker.BadRequestError, match=stack.base_model):
        service.create_lora_training_client(base_model='no/such-model').result()
    with pytest.raises(tinker.BadRequestError):
        new_model(service, stack, rank=1 << 15)
    bad = [
        ([weighted([3, VOCAB_SIZE, 5])], 'cross_entropy', None),
        ([datum([3, 4, 5], weights=[1.0])], 'cross_entropy', None),
        ([datum([3, 4, 5])], 'ppo', None),
        ([weighted([3, 4, 5])], 'cross_entropy', {'beta': 1.0}),
        ([weighted([3] * (MAX_POSITIONS + 2))], 'cross_entropy', None),
    ]
    for data, loss_fn, config in bad:
        with pytest.raises(tinker.BadRequestError):
            model.forward_backward(data, loss_fn, config).result()
    with pytest.raises(tinker.BadRequestError):
        model.optim_step(tinker.AdamParams(learning_rate=-1.0)).result()
    train(model, *EXAMPLES)


def test_absent_weights_and_bad_keys_have_their_own_errors(service: tinker.ServiceClient, stack: StackState) -> None:
    """Missing weights are not found, and an invalid key is an authentication error."""
    with pytest.raises(tinker.NotFoundError):
        service.create_training_client_from_state('tinker://no-run:train:0/weights/none').result()
    with pytest.raises(tinker.AuthenticationError), rest_client(stack, api_key='tml-' + 'x' * 32) as stranger:
        stranger.get_server_capabilities().result()


def test_finished_session_accepts_no_operations(stack: StackState) -> None:
    """An operation on a finished session's model raises an error with status 410."""
    with service_client(stack) as first:
        model_id = new_model(first, stack).model_id
        session_id = first.holder.get_session_id()
    with service_client(stack) as second:
        model = new_model(second, stack)
        model.model_id = model_id
        with pytest.raises(tinker.APIStatusError) as refused:
            model.optim_step(ADAM).result()
    assert refused.value.status_code == 410
    assert _session(stack, session_id).state == session_service_pb2.SESSION_STATE_FINISHED


def test_heartbeats_renew_the_session(service: tinker.ServiceClient, stack: StackState) -> None:
    """The SDK's heartbeats renew the session, as the native API reports."""
    session_id = service.holder.get_session_id()
    session = _session(stack, session_id)
    while session.heartbeat_time.ToDatetime() <= session.create_time.ToDatetime():
        session = _session(stack, session_id)
    assert session.state == session_service_pb2.SESSION_STATE_ACTIVE
    assert dict(session.user_metadata)['who'] == 'tests'


def _session(stack: StackState, session_id: str) -> session_service_pb2.Session:
    with grpc.insecure_channel(stack.address) as channel:
        sessions = session_service_pb2_grpc.SessionServiceStub(channel)
        request = session_service_pb2.GetSessionRequest(session_id=session_id)
        metadata = (('authorization', f'Bearer {stack.read_api_key()}'),)
        return sessions.GetSession(request, metadata=metadata, timeout=10).session
