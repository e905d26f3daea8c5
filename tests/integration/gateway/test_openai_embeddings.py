"""Tests of embeddings over OpenAI's API: vectors, order, encodings, weights, usage, quotas and refusals."""

import base64
import json
import tracemalloc
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.openai_gateway import CHECKPOINT, FOREIGN_RUN, RUN, OpenAiGateway, openai_gateway
from fixtures.running_gateway import ADMIN
from fixtures.sampled import lora_weights
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    quota_service_pb2,
    quota_service_pb2_grpc,
)
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1 import tensor_pb2
from twinkle.data_format import ProbeResult
from twinkle_services.gateway.openai import embeddings
from twinkle_services.gateway.openai.models import ResolvedModel
from twinkle_services.sampler.domain.adapter import CheckpointFacts
from twinkle_services.sampler.domain.generation import GenerationRequest

TEXTS = ['one', 'three', 'five', 'seven']
TOKENS = [[byte + 3 for byte in text.encode()] for text in TEXTS]


class EmbeddingEngine(FakeSamplerEngine):
    """Embeds a prompt as the number of its tokens, the version and the vector of `rest`."""

    rest: tuple[float, ...] = (0.0,)
    probe_count = 0

    def _probe(self, request: GenerationRequest) -> ProbeResult | None:
        if request.params.prompt_probe is None:
            return None
        self.probe_count += 1
        values = (len(request.prompt_token_ids), self._version(request), *self.rest)
        return ProbeResult(embedding=np.asarray(values, np.float32))


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway that serves the OpenAI API."""
    async with openai_gateway(tmp_path, EmbeddingEngine()) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


def expected(lengths: list[int], version: int) -> np.ndarray:
    """Return the vectors of inputs with these numbers of tokens, scaled to unit length."""
    vectors = np.asarray([[length, version, 0] for length in lengths], np.float64)
    return vectors / np.linalg.norm(vectors, axis=1, keepdims=True)


def vectors_of(response: Any) -> np.ndarray:
    """Return the vectors of a response, whose entries must be in order."""
    assert [item.index for item in response.data] == list(range(len(response.data)))
    assert {item.object for item in response.data} == {'embedding'}
    return np.asarray([item.embedding for item in response.data])


async def test_vectors_are_in_the_order_of_the_inputs(running: OpenAiGateway) -> None:
    """Texts and token lists have the same unit vectors, in order; usage counts their tokens."""
    client = running.client()
    for given in (TEXTS, TOKENS):
        response = await client.embeddings.create(model=f'{RUN}@1', input=given)
        np.testing.assert_allclose(vectors_of(response), expected([3, 5, 4, 5], 1), rtol=1e-6)
        assert (response.object, response.model) == ('list', f'{RUN}@1')
        assert (response.usage.prompt_tokens, response.usage.total_tokens) == (17, 17)
    for given in ('three', TOKENS[1]):
        response = await client.embeddings.create(model='tiny', input=given)
        np.testing.assert_allclose(vectors_of(response), expected([5], 0), rtol=1e-6)


async def test_texts_become_chats_with_an_input_role(running: OpenAiGateway) -> None:
    """The chat template renders each text if `input_role` is set, which adds two tokens in the fake engine."""
    client = running.client()
    response = await client.embeddings.create(model='tiny', input=TEXTS, extra_body={'input_role': 'user'})
    np.testing.assert_allclose(vectors_of(response), expected([5, 7, 6, 7], 0), rtol=1e-6)
    assert response.usage.prompt_tokens == 17 + 2 * len(TEXTS)


async def test_encodings_contain_the_same_numbers(running: OpenAiGateway) -> None:
    """Base64 is the little-endian float32 form of the numbers that `float` returns, which is the default."""
    body = {'model': 'tiny', 'input': TEXTS, 'user': 'someone', 'dimensions': None}
    encoded, plain, default = [
        (await running.post('/embeddings', {**body, **extra})).json()['data']
        for extra in ({'encoding_format': 'base64'}, {'encoding_format': 'float'}, {})
    ]
    assert plain == default
    for one, other in zip(encoded, plain, strict=True):
        np.testing.assert_array_equal(
            np.frombuffer(base64.b64decode(one['embedding']), '<f4'), np.float32(other['embedding'])
        )


async def test_response_names_the_version_that_computed_it(running: OpenAiGateway) -> None:
    """Runs, versions, checkpoints and the base model are embedded with their own weights, which the response names."""
    facts = CheckpointFacts(path=CHECKPOINT, digest='d' * 64, step_count=7)
    running.source.checkpoints['default', CHECKPOINT] = (facts, lora_weights(0, adapter_id=RUN))
    client = running.client(prefix='/oai/api/v1')
    for name, version in (('tiny', 0), (RUN, 2), (f'{RUN}@1', 1), (f'{RUN}@2', 2), (CHECKPOINT, 7)):
        response = await client.embeddings.create(model=name, input='three')
        np.testing.assert_allclose(vectors_of(response), expected([5], version), rtol=1e-6)
        used = response.model_extra['twinkle']
        assert (used['base_model'], used['version']) == ('tiny', version)
    assert (used['adapter_id'], used['checkpoint_path']) == (None, CHECKPOINT)


async def test_zero_vector_stays_zero(running: OpenAiGateway) -> None:
    """An embedding without a direction is returned as zeros instead of NaN."""
    for given, wanted in ((np.zeros(3, '<f4'), [0] * 3), (np.full(4, 1e30, '<f4'), [0.5] * 4)):
        np.testing.assert_allclose(np.frombuffer(embeddings.unit_vector(given.tobytes()), '<f4'), wanted)
    assert running.engine.load.running_sequences == 0


async def test_usage_is_metered_and_limited_like_sampling(running: OpenAiGateway) -> None:
    """Input tokens count as usage of the run, and a tenant over its token rate is refused."""
    client = running.client()
    for model in (RUN, RUN, 'tiny'):
        await client.embeddings.create(model=model, input=TEXTS)
    catalogue = catalogue_service_pb2_grpc.CatalogueServiceStub(running.gateway.channel)
    usages = (await catalogue.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=ADMIN)).usages
    counts = {item.run_id: (item.prompt_count, item.prompt_token_count, item.sampled_token_count) for item in usages}
    assert counts == {RUN: (8, 34, 0), '': (4, 17, 0)}
    quotas = quota_service_pb2_grpc.QuotaServiceStub(running.gateway.channel)
    quota = quota_service_pb2.Quota(tokens_per_second=1, burst_tokens=1)
    await quotas.SetQuota(quota_service_pb2.SetQuotaRequest(tenant_id='default', quota=quota), metadata=ADMIN)
    refusals: list[Any] = []
    for _ in range(3):
        response = await running.post('/embeddings', {'model': 'tiny', 'input': TEXTS})
        refusals += [response] if response.status_code == 429 else []
    assert refusals
    assert refusals[0].json()['error']['reason'] == 'QUOTA_EXCEEDED'
    assert int(refusals[0].headers['retry-after']) >= 1


CASES: list[tuple[dict[str, Any], str]] = [
    ({}, 'input'),
    ({'input': ''}, 'input'),
    ({'input': []}, 'input'),
    ({'input': {'a': 1}}, 'input'),
    ({'input': ['a', '']}, 'input[1]'),
    ({'input': ['a', [1]]}, 'input[1]'),
    ({'input': [1, 'a']}, 'input[1]'),
    ({'input': [[1], []]}, 'input[1]'),
    ({'input': [[1], [100_000]]}, 'input[1]'),
    ({'input': ['a'] * (embeddings.MAX_INPUTS + 1)}, 'input'),
    ({'input': 'a', 'dimensions': 2}, 'dimensions'),
    ({'input': 'a', 'encoding_format': 'int8'}, 'encoding_format'),
    ({'input': 'a', 'user': 3}, 'user'),
    ({'input': 'a', 'input_role': 'system'}, 'input_role'),
    ({'input': ['a', 'b'], 'input_role': 3}, 'input_role'),
    ({'input': [1, 2], 'input_role': 'user'}, 'input_role'),
    ({'input': 'a', 'stream': True}, 'stream'),
    ({'input': 'a', 'model': ''}, 'model'),
]


async def test_invalid_parameters_are_named(running: OpenAiGateway) -> None:
    """A wrong, unknown or ineffective parameter is refused with status 400 and the name of the parameter."""
    mismatches: list[Any] = []
    for body, param in CASES:
        response = await running.post('/embeddings', {'model': 'tiny', **body})
        error = response.json()['error']
        if (response.status_code, error['param'], error['reason']) != (400, param, 'INVALID_FIELD'):
            mismatches.append((body, response.status_code, error))
    assert mismatches == []


async def test_long_input_and_foreign_model_are_refused(running: OpenAiGateway) -> None:
    """An input longer than the context is refused with OpenAI's code, and another tenant's run is not found."""
    client = running.client()
    with pytest.raises(openai.BadRequestError) as raised:
        await client.embeddings.create(model='tiny', input=['a', 'a' * 600])
    assert raised.value.code == 'context_length_exceeded'
    with pytest.raises(openai.NotFoundError) as missing:
        await client.embeddings.create(model=FOREIGN_RUN, input='a')
    assert missing.value.code == 'model_not_found'
    trainer = await running.gateway.make_key('alice', scopes=(1,))
    with pytest.raises(openai.PermissionDeniedError):
        await running.client(trainer.secret).embeddings.create(model='tiny', input='a')


async def test_response_that_would_be_too_large_is_refused(running: OpenAiGateway) -> None:
    """Too many long vectors are refused, unless a shorter encoding fits."""
    engine: Any = running.engine
    size = embeddings.MAX_RESPONSE_BYTES // 24 // 100
    engine.rest = (0.0,) * size
    body = {'model': 'tiny', 'input': ['a'] * 101}
    refused = await running.post('/embeddings', body)
    assert (refused.status_code, refused.json()['error']['param']) == (400, 'input')
    accepted = await running.post('/embeddings', {**body, 'encoding_format': 'base64'})
    assert accepted.status_code == 200
    assert len(accepted.json()['data']) == 101


async def test_known_size_refuses_a_large_response_before_sampling(running: OpenAiGateway) -> None:
    """Too many inputs are refused before any is computed if an earlier response has shown the size of the vectors."""
    engine: Any = running.engine
    engine.rest = (0.0,) * (embeddings.MAX_RESPONSE_BYTES // 24 // 100)
    assert (await running.post('/embeddings', {'model': 'tiny', 'input': 'a'})).status_code == 200
    refused = await running.post('/embeddings', {'model': f'{RUN}@1', 'input': ['a'] * 101})
    assert (refused.status_code, refused.json()['error']['param']) == (400, 'input')
    assert engine.probe_count == 1


@pytest.mark.parametrize('encoding', ['float', 'base64'])
@pytest.mark.parametrize(('count', 'size'), [(40, 4096), (1, 4096), (2048, 8)])
async def test_reserved_memory_covers_the_response(encoding: str, count: int, size: int) -> None:
    """Building a response of few or many vectors takes less memory than was reserved before the second vector."""
    body = {'model': 'm', 'input': ['a'] * count, 'encoding_format': encoding}
    request, reserved, sizes = embeddings.embedding_request(body), list[int](), dict[str, int]()
    vector = np.linspace(-1, 1, size, dtype='<f4').tobytes()

    async def results() -> AsyncIterator[wire.SampleBatchResponse]:
        for index in reversed(range(count)):
            prompt = sampling_pb2.PromptInfo(embedding=tensor_pb2.Tensor(data=vector))
            yield wire.SampleBatchResponse(prompt_index=index, prompt=prompt)

    async def reserve(size_bytes: int) -> None:
        reserved.append(size_bytes)

    tracemalloc.start()
    try:
        model = ResolvedModel(base_model='m')
        parts = await embeddings.embedding_response(request, model, results(), sizes=sizes, reserve=reserve)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [entry['index'] for entry in json.loads(b''.join(parts))['data']] == list(range(count))
    assert sizes == {'m': size}
    assert [peak] < reserved < [6 * peak]
