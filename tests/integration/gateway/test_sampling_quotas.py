"""Tests of the quotas and the metering of sampling, with fake samplers."""

import asyncio
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import httpx
import pytest

from fixtures.fake_samplers import FakeSampler, until
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, ADMIN_KEY, failure_of
from fixtures.sampled_answers import ints, sample_request, undisturbed
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc, quota_service_pb2_grpc
from twinkle.api.gateway.v1 import quota_service_pb2 as quotas
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.config import FleetConfig
from twinkle_services.kit.errors import DomainError, Draining, InvalidField, ServiceUnreachable


async def allow(fleet: RunningFleet, **limits: Any) -> None:
    """Set the quota of the default tenant."""
    stub = quota_service_pb2_grpc.QuotaServiceStub(fleet.gateway.channel)
    await stub.SetQuota(quotas.SetQuotaRequest(tenant_id='default', quota=quotas.Quota(**limits)), metadata=ADMIN)


async def used(fleet: RunningFleet) -> dict[str, tuple[int, int, int]]:
    """Return the prompt count, prompt tokens and sampled tokens of each run."""
    stub = catalogue_service_pb2_grpc.CatalogueServiceStub(fleet.gateway.channel)
    response = await stub.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=ADMIN)
    return {
        item.run_id: (item.prompt_count, item.prompt_token_count, item.sampled_token_count) for item in response.usages
    }


async def read_all(call: Any) -> None:
    """Read a stream to its end."""
    async for _ in call:
        pass


async def test_samples_are_metered_by_the_run_of_their_weights(tmp_path: Path) -> None:
    """A prompt counts once for any number of sequences; batches and scores count each of their prompts."""
    async with running_fleet(tmp_path, FakeSampler(versions={'ad': {4}}), FakeSampler(versions={'ad': {4}})) as fleet:
        await read_all(fleet.stub.Sample(sample_request((1, 2, 3), max_tokens=8, count=2), metadata=ADMIN))
        assert await used(fleet) == {'': (1, 3, 16)}
        prompts = [sampling_pb2.Prompt(token_ids=ints(range(size))) for size in (1, 2, 3, 4)]
        batch = wire.SampleBatchRequest(
            base_model='tiny',
            prompts=prompts,
            params=sampling_pb2.SamplingParams(max_tokens=3),
            adapter=sampling_pb2.AdapterRef(adapter_id='ad', exact=4),
        )
        await read_all(fleet.stub.SampleBatch(batch, metadata=ADMIN))
        assert await used(fleet) == {'': (1, 3, 16), 'ad': (4, 10, 12)}
        score = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints([1, 2]), ints([1, 2, 3])])
        await fleet.stub.ComputeLogprobs(score, metadata=ADMIN)
        assert await used(fleet) == {'': (3, 8, 16), 'ad': (4, 10, 12)}


@pytest.mark.parametrize('failure_mode', ['early', 'unreachable'])
async def test_stream_that_changes_its_sampler_is_metered_once(tmp_path: Path, failure_mode: str) -> None:
    """A stream that continues on another sampler counts its prompt and each token once."""
    for end_after in range(6):
        failing = FakeSampler(name='failing', end_after=end_after, failure_mode=failure_mode)
        async with running_fleet(tmp_path / f'{end_after}', failing, FakeSampler(name='good')) as fleet:
            for _ in range(2):
                await read_all(fleet.stub.Sample(sample_request((1, 2, 3), max_tokens=8), metadata=ADMIN))
            assert await used(fleet) == {'': (2, 6, 16)}


async def test_continued_request_is_metered_for_the_tokens_that_are_computed_again(tmp_path: Path) -> None:
    """A continuation counts its prompt and the tokens of unfinished sequences as a prompt, then each new token."""
    request = sample_request((1, 2, 3), max_tokens=4, count=2)
    tokens = undisturbed(request)
    request.continued.add(sequence_index=0, token_ids=ints(tokens[0][:2]))
    request.continued.add(sequence_index=1, token_ids=ints(tokens[1]), is_finished=True)
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        await read_all(fleet.stub.Sample(request, metadata=ADMIN))
        assert await used(fleet) == {'': (1, 5, 2)}


async def test_continued_request_is_metered_if_it_is_cancelled_before_the_first_token(tmp_path: Path) -> None:
    """A client that leaves before the first chunk pays for the tokens that its sampler computes again."""
    request = sample_request((1, 2, 3), max_tokens=4)
    request.continued.add(token_ids=ints(undisturbed(request)[0][:2]))
    sampler = FakeSampler()
    sampler.call_gate.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        call = fleet.stub.Sample(request, metadata=ADMIN)
        reading = asyncio.ensure_future(read_all(call))
        await until(lambda: 'Sample' in sampler.calls)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reading
        while not await used(fleet):
            pass
        assert await used(fleet) == {'': (1, 5, 0)}


@pytest.mark.parametrize('refusal', [Draining(), InvalidField('params', 'must be valid'), ServiceUnreachable('model')])
async def test_continued_request_is_not_metered_if_all_samplers_refuse_it(tmp_path: Path, refusal: DomainError) -> None:
    """A continuation that no sampler accepts costs nothing, and the same request is metered once it is accepted."""
    request = sample_request((1, 2, 3), max_tokens=4)
    request.continued.add(token_ids=ints(undisturbed(request)[0][:2]))
    samplers = FakeSampler(name='one', refusal=refusal), FakeSampler(name='other', refusal=refusal)
    options = FleetConfig(replica_wait=timedelta(milliseconds=100), begin_wait=timedelta(milliseconds=100))
    async with running_fleet(tmp_path, *samplers, fleet=options) as fleet:
        await failure_of(fleet.stub.Sample(request, metadata=ADMIN))
        assert 'Sample' in samplers[0].calls + samplers[1].calls
        assert await used(fleet) == {}
        for sampler in samplers:
            sampler.refusal = None
        await read_all(fleet.stub.Sample(request, metadata=ADMIN))
        assert await used(fleet) == {'': (1, 5, 2)}


async def test_continued_request_is_metered_if_its_deadline_passes(tmp_path: Path) -> None:
    """A client whose deadline passes before the first chunk pays for the tokens that its sampler computes again."""
    request = sample_request((1, 2, 3), max_tokens=4)
    request.continued.add(token_ids=ints(undisturbed(request)[0][:2]))
    sampler = FakeSampler()
    sampler.call_gate.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        with pytest.raises(grpc.aio.AioRpcError, match='DEADLINE_EXCEEDED'):
            await read_all(fleet.stub.Sample(request, metadata=ADMIN, timeout=2))
        while not await used(fleet):
            pass
        assert await used(fleet) == {'': (1, 5, 0)}


async def test_request_beyond_the_quota_is_refused(tmp_path: Path) -> None:
    """A request beyond the quota fails with a retry time; finished and cancelled requests free their slots."""
    sampler = FakeSampler()
    sampler.gate.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        await allow(fleet, concurrent_samples=2)
        calls = [fleet.stub.Sample(sample_request((index,)), metadata=ADMIN) for index in range(2)]
        await until(lambda: sampler.calls.count('Sample') == 2)
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
        assert failure.metadata == {'quota': 'concurrent_samples', 'limit': '2'}
        assert failure.retry_seconds == 1
        calls[0].cancel()
        sampler.gate.set()
        await read_all(calls[1])
        await read_all(fleet.stub.Sample(sample_request(), metadata=ADMIN))


async def test_request_of_a_tenant_without_tokens_is_refused(tmp_path: Path) -> None:
    """A running request may exceed the token quota, and the next request fails with a retry time."""
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        await allow(fleet, tokens_per_second=1, burst_tokens=1)
        await read_all(fleet.stub.Sample(sample_request((1, 2, 3), max_tokens=8), metadata=ADMIN))
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert (failure.reason, failure.metadata) == ('QUOTA_EXCEEDED', {'quota': 'tokens_per_second', 'limit': '1'})
        assert failure.retry_seconds == pytest.approx(10)
        assert await used(fleet) == {'': (1, 3, 8)}


async def test_tinker_samples_beyond_the_quota_are_retried_and_metered_once(tmp_path: Path) -> None:
    """A Tinker request beyond the quota gets status 429; a repeated request is accepted and metered once."""
    sampler = FakeSampler()
    sampler.prompt_gate.clear()
    async with running_fleet(tmp_path, sampler, http_listen='127.0.0.1:0') as fleet:
        await allow(fleet, concurrent_samples=1)
        url, headers = f'http://{fleet.gateway.http_address}/api/v1/', {'x-api-key': ADMIN_KEY}
        async with httpx.AsyncClient(base_url=url, headers=headers, timeout=60) as http:
            prompt = {'chunks': [{'type': 'encoded_text', 'tokens': [1, 2, 3]}]}
            fields = {'base_model': 'tiny', 'prompt': prompt, 'sampling_params': {'max_tokens': 4}, 'num_samples': 1}
            session = (await http.post('create_session', json={'sdk_version': '0.38.0'})).json()['session_id']
            session_fields = {'session_id': session, 'sampling_session_seq_id': 0, 'base_model': 'tiny'}
            handle = (await http.post('create_sampling_session', json=session_fields)).json()['sampling_session_id']

            async def sample(number: int) -> httpx.Response:
                numbered = {'sampling_session_id': handle, 'seq_id': number}
                return await http.post('asample', json={**fields, **numbered})

            first = await sample(0)
            assert (await sample(0)).json()['request_id'] == first.json()['request_id']
            refused = await sample(1)
            assert (refused.status_code, refused.headers['retry-after']) == (429, '1')
            sampler.prompt_gate.set()
            for number in range(2):
                while (await sample(number)).status_code == 429:
                    pass
                while (await used(fleet)).get('', (0, 0, 0))[0] <= number:
                    pass
        assert await used(fleet) == {'': (2, 6, 8)}
