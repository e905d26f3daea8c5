"""Tests of sampling with several samplers: split batches, broadcasts, totals, limits and isolation."""

import asyncio
import contextlib
import os
import random
from datetime import timedelta
from pathlib import Path

import grpc
import psutil
import pytest
from google.rpc import error_details_pb2

from fixtures.fake_samplers import FAILURE_MODES, FakeSampler, until
from fixtures.fleet import running_fleet
from fixtures.running_gateway import ADMIN, Failure, bearer, failure_of, running_gateway
from fixtures.sampled_answers import ints, numbers, read_answer, sample_request, token_at, undisturbed
from twinkle.api.sampler.v1 import engine_pb2, sampler_service_pb2_grpc, sampling_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle_services.gateway.config import FleetConfig


def batch_request(count: int, *, adapter=None, request_id: str = '') -> wire.SampleBatchRequest:
    """Return a valid batch. Each prompt is one token: the index of the prompt."""
    prompts = [sampling_pb2.Prompt(token_ids=ints([index])) for index in range(count)]
    params = sampling_pb2.SamplingParams(max_tokens=3)
    return wire.SampleBatchRequest(
        base_model='tiny', prompts=prompts, params=params, adapter=adapter, request_id=request_id
    )


def assert_batch(request: wire.SampleBatchRequest, responses: list, version: int = 0) -> None:
    """Assert that each prompt has exactly one result, with the tokens of this prompt."""
    assert sorted(response.prompt_index for response in responses) == list(range(len(request.prompts)))
    for response in responses:
        prompt = request.prompts[response.prompt_index]
        assert response.prompt.token_ids == prompt.token_ids
        seed = prompt.SerializeToString(deterministic=True)
        (sequence,) = response.sequences
        assert numbers(sequence.token_ids) == [token_at(seed, version, 0, position) for position in range(3)]
        assert {span.version for span in sequence.version_spans} == {version}


async def test_batch_is_split_at_one_version(tmp_path: Path) -> None:
    """Replicas get parts of a batch with one resolved version; results have the prompt indices of the batch."""
    samplers = [FakeSampler(versions={'ad': {4, 5}}) for _ in range(3)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        request = batch_request(60, adapter=sampling_pb2.AdapterRef(adapter_id='ad', at_least=4))
        responses = [response async for response in fleet.stub.SampleBatch(request, metadata=ADMIN)]
        assert_batch(request, responses, 5)
        assert sum('LoadAdapter' in sampler.calls for sampler in samplers) == 1
        parts = [item for sampler in samplers for item in sampler.requests if isinstance(item, wire.SampleBatchRequest)]
        assert {part.adapter.exact for part in parts} == {5}
        assert max(len(part.prompts) for part in parts) <= 26


@pytest.mark.parametrize('held', [set[int](), {4}], ids=['no version', 'an older version'])
async def test_replacement_gets_requests_once_it_has_the_current_version(tmp_path: Path, held: set[int]) -> None:
    """A new replica gets no request for an adapter until it reports the version that another replica has."""
    samplers = [FakeSampler(versions={'ad': {4, 5}}), FakeSampler(versions={'ad': held})]
    references = [
        sampling_pb2.AdapterRef(adapter_id='ad', **version) for version in ({}, {'exact': 5}, {'at_least': 4})
    ]

    async def sample(prompts: range) -> None:
        for reference in references:
            for index in prompts:
                request = sample_request([index, 7], adapter=reference, max_tokens=3)
                answer = await read_answer(fleet.stub.Sample(request, metadata=ADMIN))
                assert answer.spans == [[(5, 0, 3)]]

    async with running_fleet(tmp_path, *samplers) as fleet:
        await sample(range(30))
        assert not samplers[1].requests
        samplers[1].versions['ad'] = {5}
        await fleet.leases[1].report()
        # The prompts are new, because the gateway sends a repeated prompt to the replica that has its prefix.
        await sample(range(30, 60))
        assert samplers[1].requests


@pytest.mark.parametrize('failure_mode', FAILURE_MODES)
async def test_batch_survives_failing_samplers(tmp_path: Path, failure_mode: str) -> None:
    """Every prompt has one result although samplers fail, because other samplers run the unfinished prompts."""
    samplers = [
        FakeSampler(end_after=3, failure_mode=failure_mode),
        FakeSampler(end_after=0, failure_mode=failure_mode),
        FakeSampler(),
    ]
    async with running_fleet(tmp_path, *samplers) as fleet:
        request = batch_request(40)
        assert_batch(request, [response async for response in fleet.stub.SampleBatch(request, metadata=ADMIN)])


async def test_invalid_batch_fails_once(tmp_path: Path) -> None:
    """A batch with an unknown adapter fails with the sampler's error, and a batch without prompts is invalid."""
    async with running_fleet(tmp_path, FakeSampler(), FakeSampler()) as fleet:
        request = batch_request(4, adapter=sampling_pb2.AdapterRef(adapter_id='none'))
        assert (await failure_of(fleet.stub.SampleBatch(request, metadata=ADMIN))).reason == 'ADAPTER_NOT_FOUND'
        empty = wire.SampleBatchRequest(base_model='tiny')
        assert (await failure_of(fleet.stub.SampleBatch(empty, metadata=ADMIN))).reason == 'INVALID_FIELD'


async def test_invalid_prompt_is_named_by_its_index_in_the_batch(tmp_path: Path) -> None:
    """An error about a prompt names its index in the whole batch, not in the part of a sampler."""
    samplers = [FakeSampler(bad_token=13) for _ in range(3)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        failure = await failure_of(fleet.stub.SampleBatch(batch_request(20), metadata=ADMIN))
        assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', 'prompts[13].token_ids')
        assert violated_fields(failure) == ['prompts[13].token_ids']
        request = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints([index]) for index in range(20)])
        failure = await failure_of(fleet.stub.ComputeLogprobs(request, metadata=ADMIN))
        assert (failure.metadata['field'], violated_fields(failure)) == ('token_ids[13]', ['token_ids[13]'])


def violated_fields(failure: Failure) -> list[str]:
    """Return the field paths of an error."""
    bad_request = error_details_pb2.BadRequest()
    assert any(detail.Unpack(bad_request) for detail in failure.details)
    return [item.field for item in bad_request.field_violations]


async def test_scores_are_merged_in_request_order(tmp_path: Path) -> None:
    """Scores of several samplers are merged in request order, even if one sampler fails."""
    samplers = [FakeSampler(end_after=0), FakeSampler(), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        request = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints([index, 7]) for index in range(30)])
        response = await fleet.stub.ComputeLogprobs(request, metadata=ADMIN)
        assert [numbers(item.logprobs)[0] for item in response.sequences] == [-float(index) for index in range(30)]
        assert all(sampler.calls for sampler in samplers[1:])


async def test_commands_reach_every_replica(tmp_path: Path) -> None:
    """Pause, resume, sleep, wake-up and cache resets reach all samplers, and dropped tokens are added up."""
    samplers = [FakeSampler() for _ in range(3)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        await fleet.stub.Pause(wire.PauseRequest(), metadata=ADMIN)
        await fleet.stub.Resume(wire.ResumeRequest(), metadata=ADMIN)
        await fleet.stub.Sleep(wire.SleepRequest(), metadata=ADMIN)
        await fleet.stub.WakeUp(wire.WakeUpRequest(), metadata=ADMIN)
        response = await fleet.stub.ResetPrefixCache(wire.ResetPrefixCacheRequest(), metadata=ADMIN)
        assert response.dropped_token_count == 300
        expected = ['Pause', 'Resume', 'Sleep', 'WakeUp', 'ResetPrefixCache']
        assert [sampler.calls for sampler in samplers] == [expected] * 3


async def test_loads_and_residents_cover_the_fleet(tmp_path: Path) -> None:
    """Sequence counts are added up, cache usage is averaged, and a version on several replicas is listed once."""
    load = engine_pb2.EngineLoad(running_sequence_count=2, max_sequence_count=10, kv_usage=0.5, tokens_per_second=3)
    samplers = [
        FakeSampler(load=load, versions={'a': {1, 2}, 'b': {3}}),
        FakeSampler(load=load, versions={'a': {2}, 'c': {1}}),
    ]
    async with running_fleet(tmp_path, *samplers) as fleet:
        total = (await fleet.stub.GetLoad(wire.GetLoadRequest(), metadata=ADMIN)).load
        assert (total.running_sequence_count, total.max_sequence_count, total.kv_usage) == (4, 20, 0.5)
        watch = fleet.stub.WatchLoad(wire.WatchLoadRequest(), metadata=ADMIN)
        assert (await watch.read()).load == total
        watch.cancel()
        found, token = [], ''
        while True:
            request = wire.ListResidentAdaptersRequest(page_size=2, page_token=token)
            page = await fleet.stub.ListResidentAdapters(request, metadata=ADMIN)
            found += [(item.adapter_id, item.version, item.sequence_count) for item in page.adapters]
            token = page.next_page_token
            if not token:
                break
        assert found == [('a', 1, 1), ('a', 2, 2), ('b', 3, 1), ('c', 1, 1)]
        await fleet.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id='b'), metadata=ADMIN)
        assert 'b' not in samplers[0].versions
        failure = await failure_of(fleet.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id='b'), metadata=ADMIN))
        assert failure.reason == 'ADAPTER_NOT_FOUND'


async def test_abort_finds_only_running_requests(tmp_path: Path) -> None:
    """A running stream can be aborted, and its id is in use while it runs; an abort of an unknown id is refused."""
    samplers = [FakeSampler(), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        key = await fleet.gateway.make_key('bob', scopes=(2,))
        for sampler in samplers:
            sampler.gate.clear()
        call = fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN)
        for _ in range(2):
            await call.read()
        repeated = await failure_of(fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN))
        assert (repeated.code, repeated.reason) == (grpc.StatusCode.ALREADY_EXISTS, 'ID_TAKEN')
        await fleet.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=ADMIN)
        assert (await call.read()).finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
        unknown = wire.AbortRequest(request_id='other')
        failure = await failure_of(fleet.stub.Abort(unknown, metadata=bearer(key.secret)))
        assert failure.reason == 'REQUEST_NOT_FOUND'


async def test_samplers_get_the_identity_of_the_key(tmp_path: Path) -> None:
    """Samplers get the key's tenant and scopes, independent of the client's metadata."""
    sampler = FakeSampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        key = await fleet.gateway.make_key('alice', scopes=(2,))
        forged = (*bearer(key.secret), ('x-twinkle-tenant', 'bob'), ('x-twinkle-internal', '1'))
        await read_answer(fleet.stub.Sample(sample_request(), metadata=forged))
        caller = sampler.callers[0]
        assert (caller.tenant_id, caller.scopes, caller.is_internal) == ('alice', frozenset({'sample'}), False)


async def test_cancellation_reaches_the_samplers(tmp_path: Path) -> None:
    """Cancelling a stream or a batch cancels the calls to all samplers."""
    samplers = [FakeSampler(), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        for sampler in samplers:
            sampler.gate.clear()
        stream = fleet.stub.Sample(sample_request(), metadata=ADMIN)
        batch = fleet.stub.SampleBatch(batch_request(20), metadata=ADMIN)
        await stream.read()
        await batch.read()
        await until(lambda: sum(sampler.open_streams for sampler in samplers) >= 3)
        stream.cancel()
        batch.cancel()
        await until(lambda: not any(sampler.open_streams for sampler in samplers))


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_thousand_streams_finish_in_bounded_memory(tmp_path: Path) -> None:
    """A thousand concurrent streams of sixteen tokens complete, and memory grows by less than 300 MiB."""
    samplers = [FakeSampler(load=engine_pb2.EngineLoad(max_sequence_count=256)) for _ in range(2)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        before = psutil.Process(os.getpid()).memory_info().rss
        requests = [sample_request([index], max_tokens=16) for index in range(1000)]
        responses = await asyncio.gather(
            *(read_answer(fleet.stub.Sample(request, metadata=ADMIN)) for request in requests)
        )
        for request, response in zip(requests, responses, strict=True):
            assert response.tokens == undisturbed(request)
        assert psutil.Process(os.getpid()).memory_info().rss - before < 300 << 20
        assert all(len(sampler.calls) > 350 for sampler in samplers)


async def test_static_sampler_is_used_again_after_a_restart(tmp_path: Path) -> None:
    """A configured sampler needs no lease; requests fail while it is stopped and succeed after a restart."""
    async with FakeSampler().serving() as sampler:
        address = sampler.address
    options = FleetConfig(begin_wait=timedelta(milliseconds=50))
    async with running_gateway(tmp_path, upstream=address, fleet=options) as gateway:
        stub = sampler_service_pb2_grpc.SamplerServiceStub(gateway.channel)
        request = sample_request()
        failure = await failure_of(stub.Sample(request, metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'NO_REPLICA')
        assert address not in str(failure)
        async with FakeSampler().serving(listen=address):
            while True:
                call = stub.Sample(request, metadata=ADMIN)
                try:
                    response = await read_answer(call)
                except grpc.aio.AioRpcError:
                    continue
                assert response.tokens == undisturbed(request)
                break


async def test_unknown_base_model_is_named(tmp_path: Path) -> None:
    """A request for an unknown base model fails with NOT_FOUND and the names that the replicas report."""
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        failure = await failure_of(fleet.stub.Sample(sample_request(base_model='huge'), metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'BASE_MODEL_NOT_FOUND')
        assert failure.metadata['known'] == 'tiny'


async def test_random_bytes_cause_no_internal_error(tmp_path: Path) -> None:
    """Random bytes that are sent to any method of the sampler service never cause INTERNAL."""
    generator = random.Random(0)
    service = wire.DESCRIPTOR.services_by_name['SamplerService']
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        for method in service.methods:
            call = fleet.gateway.channel.stream_stream(f'/{service.full_name}/{method.name}')
            for _ in range(20):
                data = generator.randbytes(generator.randrange(1, 60))
                if method.name == 'WatchLoad':
                    data = b'\xff' + data
                stream = call(iter([data]), metadata=ADMIN)
                with contextlib.suppress(grpc.aio.AioRpcError):
                    async for _ in stream:
                        pass
                assert await stream.code() is not grpc.StatusCode.INTERNAL, (method.name, data)
