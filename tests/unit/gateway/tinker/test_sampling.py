"""Sampling over the Tinker API with recording samplers: the native requests, and the responses."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from tinker.proto.response_conv import deserialize_sample_response

from fixtures.fake_sampling import TOKENS, FakeSampling
from fixtures.tinker_api import CONTEXT, TinkerApi, tinker_api
from twinkle.api.sampler.v1 import sampler_service_pb2 as native
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.errors import NoReplica
from twinkle_services.gateway.futures.rules import Bounds
from twinkle_services.gateway.store.database import Database
from twinkle_services.gateway.tinker.results import sample_to_json, sample_to_proto
from twinkle_services.gateway.tinker.sampling import sample_request
from twinkle_services.gateway.tinker.wire import tinker_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.tensors import tensor_to_proto

ACCEPT = {'accept': 'application/x-protobuf'}


@pytest.fixture
def sampling() -> FakeSampling:
    """The recording samplers."""
    return FakeSampling()


@pytest.fixture
async def api(database: Database, sampling: FakeSampling) -> AsyncIterator[TinkerApi]:
    """The API for two tenants."""
    async with tinker_api(database, sampling=sampling) as running:
        yield running


def body(handle: str = '', seq_id: int = 0, **fields: Any) -> dict[str, Any]:
    """Return a request to sample."""
    session = {'sampling_session_id': handle, 'seq_id': seq_id} if handle else {}
    prompt = {'chunks': [{'type': 'encoded_text', 'tokens': [3, 4]}, {'tokens': [5]}]}
    params = fields.pop('params', {'max_tokens': 4})
    return {'num_samples': 1, 'prompt': prompt, 'sampling_params': params, **session, **fields}


async def handle_of(api: TinkerApi, **weights: Any) -> str:
    """Create a session with a sampling session, and return the id of the sampling session."""
    request = {'session_id': await api.session(), 'sampling_session_seq_id': 0, **(weights or {'base_model': 'tiny'})}
    response = await api.post('create_sampling_session', request)
    assert response.status_code == 200, response.text
    return response.json()['sampling_session_id']


async def completions_of(api: TinkerApi, handle: str, **fields: Any) -> httpx.Response:
    """Request the completions of a sampling session."""
    clone = fields.pop('clone', 0)
    target = {'type': 'sampling_session', 'sampling_session_id': handle, 'cloned_sampler_id': clone}
    return await api.post('retrieve_futures', {'target': target, 'prev_cursor': 0, **fields})


async def test_repeated_request_returns_the_same_ids(api: TinkerApi, sampling: FakeSampling) -> None:
    """A repeated request returns the same ids and is sampled once; the same number with other content is refused."""
    handle = await handle_of(api)
    first = (await api.post('asample', body(handle, num_samples=3))).json()
    assert len(set(first['sample_sequence_ids'])) == 3
    assert (await api.post('asample', body(handle, num_samples=3))).json() == first
    assert (await api.post('asample', body(handle, num_samples=2))).status_code == 400
    await api.post('retrieve_future', {'request_id': first['request_id']})
    assert [(tenant, request.base_model) for tenant, request in sampling.requests] == [('alice', 'tiny')]


async def test_response_is_protobuf_or_json(api: TinkerApi) -> None:
    """The response is protobuf if the client accepts it, and JSON otherwise."""
    submitted = await api.post('asample', body(await handle_of(api), prompt_logprobs=True, prompt_logprobs_last_n=1))
    response = deserialize_sample_response((await api.outcome(submitted, headers=ACCEPT)).content)
    assert (response.sequences[0].tokens, response.sequences[0].stop_reason) == (TOKENS, 'stop')
    assert response.prompt_logprobs == [None, None, 2.0]
    assert (await api.outcome(submitted)).json() == {
        'type': 'sample',
        'sequences': [{'stop_reason': 'stop', 'tokens': TOKENS, 'logprobs': [-1.0, -2.0, -0.5]}],
        'prompt_logprobs': [None, None, 2.0],
    }


async def test_published_weights_are_sampled_exactly_or_at_least(api: TinkerApi, sampling: FakeSampling) -> None:
    """A snapshot samples exactly the published version; an in-flight session also accepts a newer version."""
    model = await api.model()
    for number, kind in enumerate(('snapshot', 'inflight')):
        save = {'model_id': model, 'seq_id': number + 1, 'kind': kind, 'sampling_session_seq_id': number}
        handle = (await api.outcome(await api.post('save_weights_for_sampler', save))).json()['sampling_session_id']
        assert (await api.get(f'samplers/{handle}')).json() == {'sampler_id': handle, 'base_model': 'tiny'}
        await api.outcome(await api.post('asample', body(handle)))
    exact, at_least = (request.adapter for _, request in sampling.requests)
    assert (exact.adapter_id, exact.WhichOneof('version'), exact.exact) == (model, 'exact', 3)
    assert (at_least.adapter_id, at_least.WhichOneof('version'), at_least.at_least) == (model, 'at_least', 3)


async def test_saved_weights_are_sampled_by_their_path(api: TinkerApi, sampling: FakeSampling) -> None:
    """Weights saved for sampling can be sampled by path; training weights and missing weights are refused."""
    model = await api.model()
    path = await api.outcome(await api.post('save_weights_for_sampler', {'model_id': model, 'seq_id': 1, 'path': 'a'}))
    path = path.json()['path']
    handle = await handle_of(api, model_path=path)
    expected = {'sampler_id': handle, 'base_model': 'tiny', 'model_path': path}
    assert (await api.get(f'samplers/{handle}')).json() == expected
    for request in (body(handle), body(model_path=path)):
        await api.outcome(await api.post('asample', request))
    assert {request.adapter.checkpoint_path for _, request in sampling.requests} == {
        f'twinkle://{model}/weights/a.sampler'
    }
    statuses: list[int] = []
    for name in (f'tinker://{model}/weights/a', f'tinker://{model}/sampler_weights/b', 'nonsense'):
        request = {'session_id': await api.session(), 'sampling_session_seq_id': 0, 'model_path': name}
        statuses.append((await api.post('create_sampling_session', request)).status_code)
    assert statuses == [400, 404, 400]


async def test_completions_are_reported_once_to_the_right_clone(api: TinkerApi, sampling: FakeSampling) -> None:
    """Completions after a cursor are reported once, and only to the clone that submitted the request."""
    handle = await handle_of(api)
    clone_id = (await api.post('join_sampling_session', {'sampling_session_id': handle})).json()['client_counter']
    sampling.gate.clear()
    ids = [(await api.post('asample', body(handle, seq))).json()['request_id'] for seq in (0, clone_id * 10**9)]
    waiting = asyncio.create_task(completions_of(api, handle))
    sampling.gate.set()
    first = (await waiting).json()
    assert first['completions'] == [{'state': 'finished', 'request_id': ids[0]}]
    again = (await completions_of(api, handle, prev_cursor=first['cursor'], timeout=0)).json()
    assert again == {'completions': [], 'cursor': first['cursor']}
    assert (await completions_of(api, handle, clone=clone_id)).json()['completions'] == [
        {'state': 'finished', 'request_id': ids[1]}
    ]
    # An unknown cursor loses no completion.
    assert (await completions_of(api, handle, prev_cursor=99, timeout=0)).json() == first
    # A cursor beyond all completions returns no completion.
    beyond = (1 << 63) - 1
    empty = await completions_of(api, handle, prev_cursor=beyond, timeout=0)
    assert empty.json() == {'completions': [], 'cursor': beyond}


async def test_transient_failures_are_retried_and_others_reported(api: TinkerApi, sampling: FakeSampling) -> None:
    """A request waits for a sampler; a refusal fails as a user error, and an abort fails as a server error."""
    handle = await handle_of(api)
    sampling.failures = [NoReplica('sampler', 'tiny')] * 3
    await api.outcome(await api.post('asample', body(handle)))
    assert len(sampling.requests) == 4
    sampling.failures = [InvalidField('params.seed', 'is invalid')]
    failed = await api.post('asample', body(handle, 1))
    assert (await api.outcome(failed)).json()['category'] == 'user'
    states = {item['state'] for item in (await completions_of(api, handle, timeout=0)).json()['completions']}
    assert states == {'finished', 'failed'}
    sampling.stop_reason = sampling_pb2.STOP_REASON_ABORT
    assert (await api.outcome(await api.post('asample', body(handle, 2)))).json()['category'] == 'server'


async def test_cancelled_request_frees_its_sampler(api: TinkerApi, sampling: FakeSampling) -> None:
    """Cancelling a future cancels the call to the sampler and fails the future."""
    handle = await handle_of(api)
    sampling.gate.clear()
    submitted = await api.post('asample', body(handle))
    await sampling.arrived.wait()
    await api.post('cancel_future', {'request_id': submitted.json()['request_id']})
    assert 'error' in (await api.outcome(submitted)).json()
    assert sampling.ended == 1


async def test_full_queue_returns_429_and_accepts_the_request_later(database: Database, sampling: FakeSampling) -> None:
    """A full queue returns 429, and the same request is accepted later."""
    sampling.gate.clear()
    async with tinker_api(database, sampling=sampling, capacity=Bounds(per_tenant=1, total=1)) as api:
        handle = await handle_of(api)
        first = await api.post('asample', body(handle, 0))
        assert (await api.post('asample', body(handle, 1))).status_code == 429
        sampling.gate.set()
        await api.outcome(first)
        await api.outcome(await api.post('asample', body(handle, 1)))


async def test_sampling_sessions_of_other_tenants_are_not_found(api: TinkerApi) -> None:
    """Another tenant's sampling session returns 404, and a finished session returns 410."""
    handle = await handle_of(api)
    for name in (handle, 'unknown:sample:0'):
        key = {'key': 'tml-bob'}
        assert (await api.post('asample', body(name), **key)).status_code == 404
        assert (await api.post('join_sampling_session', {'sampling_session_id': name}, **key)).status_code == 404
        assert (await api.get(f'samplers/{name}', **key)).status_code == 404
    await api.post(f'sessions/{handle.partition(":")[0]}/finish', {'reason': {'type': 'success'}})
    assert (await api.post('asample', body(handle))).status_code == 410


@pytest.mark.parametrize(
    'invalid',
    [
        {'prompt': {'chunks': []}},
        {'prompt': {'chunks': [{'type': 'image', 'data': 'AA==', 'format': 'png'}]}},
        {'prompt': {'chunks': [{'type': 'dmel', 'dmel': 'AA=='}]}},
        {'prompt': {'chunks': [{'tokens': [True]}]}},
        {'prompt': {'chunks': [{'tokens': [-1]}]}},
        {'prompt': 'text'},
        {'num_samples': 0},
        {'num_samples': 129},
        {'params': {'max_tokens': 0}},
        {'params': {'max_tokens': 2 * CONTEXT}},
        {'params': {'temperature': float('nan')}},
        {'params': {'top_p': 0}},
        {'params': {'seed': 1 << 64}},
        {'params': {'stop': ['a', 1]}},
        {'params': {'stop': [1, 'a']}},
        {'params': {'stop': 3}},
        {'topk_prompt_logprobs': 21},
        {'prompt_logprobs_last_n': 1},
        {'prompt_logprobs': True, 'prompt_logprobs_last_n': 3},
        {'target_prompt_logprobs': {'data': [1], 'dtype': 'int64', 'shape': [1, 1]}},
        {'prompt_alt_tokens_k': -1},
        {'seq_id': -1},
    ],
)
async def test_invalid_request_is_refused_with_a_detail(
    api: TinkerApi, sampling: FakeSampling, invalid: dict[str, Any]
) -> None:
    """An invalid request returns 400 with a detail, and does not reach a sampler."""
    response = await api.post('asample', {**body(await handle_of(api), params=invalid.pop('params', {})), **invalid})
    assert (response.status_code, bool(response.json()['detail'])) == (400, True)
    assert sampling.requests == []


@pytest.mark.parametrize(
    ('stop', 'expected'),
    [
        (None, ((), (), False)),
        ([], ((), (), True)),
        ('end', (('end',), (), False)),
        (['a', 'b'], (('a', 'b'), (), False)),
        ([5, 6], ((), (5, 6), False)),
    ],
)
def test_stop_conditions_are_converted(stop: Any, expected: tuple[Any, ...]) -> None:
    """A stop may be a string, strings or tokens; with an empty list, even the end of sequence is ignored."""
    params = sample_request(body('h', params={'stop': stop})).request.params
    assert (tuple(params.stop_strings), tuple(params.stop_token_ids), params.is_eos_ignored) == expected
    assert (params.temperature, params.top_k, params.top_p, params.HasField('max_tokens')) == (1.0, -1, 1.0, False)


@given(
    lengths=st.lists(st.integers(1, 5), min_size=1, max_size=3),
    prompt_length=st.integers(2, 6),
    count=st.integers(1, 4),
    last=st.integers(0, 5),
)
def test_sdk_reads_every_response(lengths: list[int], prompt_length: int, count: int, last: int) -> None:
    """The SDK reads tokens, log-probabilities and most likely tokens; positions without a score contain None."""
    generator = np.random.default_rng(prompt_length)
    result = native.SampleBatchResponse()
    for length in lengths:
        sequence = result.sequences.add(stop_reason=sampling_pb2.STOP_REASON_LENGTH)
        sequence.token_ids.CopyFrom(tensor_to_proto(np.arange(length, dtype=np.int32)))
        sequence.logprobs.CopyFrom(tensor_to_proto(-generator.random(length, np.float32)))
    scores = np.array([np.nan, *-generator.random(prompt_length - 1)], np.float32)
    result.prompt.logprobs.CopyFrom(tensor_to_proto(scores))
    top = np.full((prompt_length, count), -np.inf, np.float32)
    top[1:] = -1.5
    result.prompt.top_logprobs.token_ids.CopyFrom(tensor_to_proto(np.full((prompt_length, count), 9, np.int32)))
    result.prompt.top_logprobs.logprobs.CopyFrom(tensor_to_proto(top))
    facts: dict[str, int] = {'last_n': min(last, prompt_length - 1)} if last else {}

    message = sample_to_proto(result, facts)
    response = deserialize_sample_response(message.SerializeToString())
    assert [sequence.tokens for sequence in response.sequences] == [list(range(length)) for length in lengths]
    assert {sequence.stop_reason for sequence in response.sequences} == {'length'}
    scored = facts.get('last_n', prompt_length - 1)
    is_scored = [position >= prompt_length - scored for position in range(prompt_length)]
    assert response.prompt_logprobs is not None
    assert response.topk_prompt_logprobs is not None
    assert [value is not None for value in response.prompt_logprobs] == is_scored
    assert [row is not None for row in response.topk_prompt_logprobs] == is_scored
    document = sample_to_json(result, facts)
    assert [row is not None for row in document['topk_prompt_logprobs']] == is_scored
    assert [value is not None for value in document['prompt_logprobs']] == is_scored
    assert isinstance(message, tinker_pb2.SampleResponse)
