"""Tests that a stream whose sampler fails continues on another sampler without lost or repeated tokens."""

import asyncio
import random
from contextlib import AsyncExitStack
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.fake_samplers import FAILURE_MODES, FakeSampler
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, failure_of
from fixtures.sampled_answers import ints, numbers, read_answer, sample_request, undisturbed
from fixtures.tiers import mostly_slow
from twinkle.api.gateway.v1.fleet_service_pb2 import REPLICA_STATE_LOST
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.api.tensor.v1.tensor_pb2 import Tensor
from twinkle_services.gateway.config import FleetConfig
from twinkle_services.kit.errors import AdapterNotFound, InvalidField, QueueFull

SEEDS = 100


@pytest.mark.parametrize('failure_mode', mostly_slow(FAILURE_MODES, kept=2))
async def test_stream_continues_after_every_kind_of_failure(tmp_path: Path, failure_mode: str) -> None:
    """A stream equals one without a failure, for each failure mode and each message after which its sampler fails."""
    for end_after in range(8):
        samplers = [FakeSampler(end_after=end_after, failure_mode=failure_mode) for _ in range(2)]
        async with running_fleet(tmp_path / f'{end_after}', *samplers, FakeSampler()) as fleet:
            request = sample_request(max_tokens=3, count=2)
            response = await read_answer(fleet.stub.Sample(request, metadata=ADMIN), 2)
            assert response.tokens == undisturbed(request)
            assert response.spans == [[(0, 0, 3)]] * 2


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_random_failures_change_no_response(tmp_path: Path) -> None:
    """If samplers fail randomly and repeatedly, streams deliver every token once and in order."""
    async with running_fleet(tmp_path) as fleet:
        for seed in range(SEEDS):
            await _run_seed(fleet, random.Random(seed), seed)


async def _run_seed(fleet: RunningFleet, generator: random.Random, seed: int) -> None:
    samplers = [
        FakeSampler(
            versions={'ad': {1, 2, 3}},
            end_after=generator.randrange(2, 12),
            failure_mode=generator.choice(FAILURE_MODES),
            is_lasting=generator.random() < 0.5,
            tokens_per_message=generator.randrange(1, 4),
        )
        for _ in range(2)
    ]
    samplers.append(FakeSampler(versions={'ad': {1, 2, 3}}))
    async with AsyncExitStack() as stack:
        for index, sampler in enumerate(samplers):
            await stack.enter_async_context(sampler.serving())
            await fleet.join(sampler, f's{seed}-{index}')
        requests = []
        for index in range(4):
            adapter = generator.choice([None, sampling_pb2.AdapterRef(adapter_id='ad', exact=2)])
            requests.append(
                sample_request(
                    [seed, index, 7],
                    max_tokens=generator.randrange(1, 12),
                    count=generator.randrange(1, 4),
                    adapter=adapter,
                )
            )
        calls = [fleet.stub.Sample(request, metadata=ADMIN, timeout=30) for request in requests]
        counts = [request.params.sample_count for request in requests]
        responses = await asyncio.gather(*map(read_answer, calls, counts))
        for request, response in zip(requests, responses, strict=True):
            version = 2 if request.HasField('adapter') else 0
            assert response.tokens == undisturbed(request, version), seed
            length = request.params.max_tokens
            assert response.spans == [[(version, 0, length)]] * request.params.sample_count, seed
            assert response.prompt == [seed, int(response.prompt[1]), 7], seed
        for lease in fleet.leases:
            lease.call.cancel()


async def test_stream_keeps_its_version(tmp_path: Path) -> None:
    """A stream continues with the version that it started with, even if a newer version exists."""
    first = FakeSampler(versions={'ad': {1}}, end_after=3, failure_mode='stop')
    second = FakeSampler(versions={'ad': {1, 2}})
    async with running_fleet(tmp_path, first) as fleet:
        request = sample_request(adapter=sampling_pb2.AdapterRef(adapter_id='ad'))
        call = aiter(fleet.stub.Sample(request, metadata=ADMIN))
        assert (await anext(call)).HasField('prompt')
        async with second.serving():
            await fleet.join(second, 'later')
            received = [response async for response in call]
    assert {response.delta.version for response in received if response.HasField('delta')} == {1}
    assert second.requests[-1].adapter.exact == 1
    assert all(caller.is_internal for caller in second.callers)
    assert {caller.tenant_id for caller in second.callers} == {'default'}


@pytest.mark.parametrize('adapter', [None, sampling_pb2.AdapterRef(adapter_id='ad', exact=2)])
@pytest.mark.parametrize('end_after', [None, 1])
async def test_client_continues_a_request(
    tmp_path: Path, adapter: sampling_pb2.AdapterRef | None, end_after: int | None
) -> None:
    """A client that lost its connection receives the remaining tokens, even if the next sampler fails, too."""
    version = 2 if adapter else 0
    samplers = [FakeSampler(versions={'ad': {2, 3}}, end_after=end_after) for _ in range(2)]
    async with running_fleet(tmp_path, *samplers, FakeSampler(versions={'ad': {2, 3}})) as fleet:
        request = sample_request(max_tokens=5, count=3, adapter=adapter)
        expected = undisturbed(request, version)
        for index, (length, is_finished) in enumerate([(2, False), (0, False), (5, True)]):
            request.continued.add(
                sequence_index=index, token_ids=ints(expected[index][:length]), is_finished=is_finished
            )
        response = [item async for item in fleet.stub.Sample(request, metadata=ADMIN)]
        tokens: list[list[int]] = [[], [], []]
        for item in (item for item in response if item.HasField('delta')):
            tokens[item.delta.sequence_index] += numbers(item.delta.token_ids)
        assert tokens == [expected[0][2:], expected[1], []]
        assert [item.finished.sequence_index for item in response if item.HasField('finished')] == [0, 1]
        assert not any(item.HasField('prompt') for item in response)


async def test_invalid_continuation_is_refused(tmp_path: Path) -> None:
    """A continuation needs the prompt's tokens, an exact version, and one entry per sequence; nothing is sampled."""
    latest, chat = sampling_pb2.AdapterRef(adapter_id='ad'), sampling_pb2.Prompt(text='Why?')
    part = wire.SequenceSoFar(token_ids=ints([5]))
    cases = {
        'prompt.token_ids': sample_request(continued=[part]),
        'adapter.exact': sample_request(continued=[part], adapter=latest),
        'continued': sample_request(continued=[part, part]),
        'continued[0].sequence_index': sample_request(continued=[wire.SequenceSoFar(sequence_index=1)]),
        'continued[0].token_ids.dtype': sample_request(continued=[wire.SequenceSoFar(token_ids=Tensor(data=b'abc'))]),
    }
    cases['prompt.token_ids'].prompt.CopyFrom(chat)
    sampler = FakeSampler(versions={'ad': {1}})
    async with running_fleet(tmp_path, sampler) as fleet:
        for field, request in cases.items():
            failure = await failure_of(fleet.stub.Sample(request, metadata=ADMIN))
            assert (failure.code, failure.reason) == (grpc.StatusCode.INVALID_ARGUMENT, 'INVALID_FIELD')
            assert failure.metadata['field'] == field
    assert 'Sample' not in sampler.calls


async def test_expensive_continuation_is_refused(tmp_path: Path) -> None:
    """A client may deliver 4096 tokens, but no more, and no results that belong to the first request."""
    form = sampling_pb2.StructuredOutput(is_json_object=True)
    cases = {
        'params.structured_output': {'structured_output': form},
        'params.is_prompt_logprobs_returned': {'is_prompt_logprobs_returned': True},
        'params.prompt_top_logprob_count': {'prompt_top_logprob_count': 2},
        'params.prompt_probe': {'prompt_probe': sampling_pb2.PromptProbe(is_embedding_returned=True)},
        'continued': {'sample_count': 2},
    }
    sampler = FakeSampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        for field, params in cases.items():
            parts = [wire.SequenceSoFar(token_ids=ints([5] * 4096))]
            parts += [wire.SequenceSoFar(sequence_index=1, token_ids=ints([5]))] if field == 'continued' else []
            request = sample_request(continued=parts)
            request.params.MergeFrom(sampling_pb2.SamplingParams(**params))
            failure = await failure_of(fleet.stub.Sample(request, metadata=ADMIN))
            assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', field)
            assert 'sample the request again' in failure.message
        assert 'Sample' not in sampler.calls
        request = sample_request(max_tokens=4098)
        expected = undisturbed(request)[0]
        request.continued.add(token_ids=ints(expected[:4096]))
        response = [item async for item in fleet.stub.Sample(request, metadata=ADMIN)]
        tokens = [numbers(item.delta.token_ids) for item in response if item.HasField('delta')]
        assert tokens == [[token] for token in expected[4096:]]


@pytest.mark.parametrize('error', [AdapterNotFound('x'), InvalidField('prompt', 'must be valid')])
async def test_invalid_request_is_sent_once(tmp_path: Path, error: Exception) -> None:
    """An invalid request is sent to one sampler only."""
    samplers = [FakeSampler(refusal=error) for _ in range(3)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert failure.reason == error.reason
        assert sum(len(sampler.calls) for sampler in samplers) == 1


async def test_full_sampler_is_skipped(tmp_path: Path) -> None:
    """A full sampler is skipped; if all samplers are full, the caller gets the refusal and its retry time."""
    full = QueueFull(queue_length=1, queue_limit=1)
    samplers = [FakeSampler(refusal=full), FakeSampler(refusal=full), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        request = sample_request()
        assert (await read_answer(fleet.stub.Sample(request, metadata=ADMIN))).tokens == undisturbed(request)
        samplers[2].refusal = full
        failure = await failure_of(fleet.stub.Sample(request, metadata=ADMIN))
        assert (failure.reason, failure.retry_seconds) == ('QUEUE_FULL', 1)


async def test_request_that_fails_on_three_samplers_is_not_retried(tmp_path: Path) -> None:
    """A request that fails on three samplers without a new token is not sent to a fourth."""
    samplers = [FakeSampler(end_after=0, is_lasting=True) for _ in range(5)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert failure.code is grpc.StatusCode.INTERNAL
        assert sum(len(sampler.calls) for sampler in samplers) == 3


async def test_stream_without_a_sampler_waits_for_one(tmp_path: Path) -> None:
    """A started stream waits for another sampler, and continues once a sampler joins."""
    first, second = FakeSampler(end_after=3, failure_mode='stop'), FakeSampler()
    async with running_fleet(tmp_path, first) as fleet:
        request = sample_request()
        read_task = asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=ADMIN)))
        await first.is_stopping.wait()
        async with second.serving():
            await fleet.join(second, 'later')
            assert (await read_task).tokens == undisturbed(request)


async def test_stream_without_a_sampler_fails_after_the_wait(tmp_path: Path) -> None:
    """If no sampler joins in time, started and new requests fail with NO_REPLICA."""
    options = FleetConfig(replica_wait=timedelta(milliseconds=200), begin_wait=timedelta(milliseconds=200))
    first = FakeSampler(end_after=3, failure_mode='stop')
    async with running_fleet(tmp_path, first, fleet=options) as fleet:
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'NO_REPLICA')
        assert failure.retry_seconds
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert failure.reason == 'NO_REPLICA'


async def test_new_stream_waits_briefly_for_a_sampler(tmp_path: Path) -> None:
    """A new request waits briefly after the last sampler has left, and runs on the next sampler."""
    first, second = FakeSampler(), FakeSampler()
    async with running_fleet(tmp_path, first) as fleet:
        fleet.leases[0].call.cancel()
        await fleet.until_state('r0', REPLICA_STATE_LOST)
        request = sample_request()
        read_task = asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=ADMIN)))
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=[request.prompt], params=request.params)
        batch_task = asyncio.ensure_future(fleet.stub.SampleBatch(batch, metadata=ADMIN).read())
        async with second.serving():
            await fleet.join(second, 'later')
            assert (await read_task).tokens == undisturbed(request)
            assert len((await batch_task).sequences) == 1


async def test_new_stream_fails_in_an_empty_fleet(tmp_path: Path) -> None:
    """A new request fails immediately with UNAVAILABLE if the fleet never had a replica."""
    options = FleetConfig(begin_wait=timedelta(hours=1))
    async with running_fleet(tmp_path, fleet=options) as fleet:
        failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'NO_REPLICA')


async def test_new_stream_waits_no_longer_than_its_deadline(tmp_path: Path) -> None:
    """The deadline of a request limits its wait for a sampler."""
    options = FleetConfig(begin_wait=timedelta(hours=1))
    async with running_fleet(tmp_path, FakeSampler(), fleet=options) as fleet:
        fleet.leases[0].call.cancel()
        await fleet.until_state('r0', REPLICA_STATE_LOST)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_answer(fleet.stub.Sample(sample_request(), metadata=ADMIN, timeout=0.5))
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_deadline_ends_the_wait(tmp_path: Path) -> None:
    """A request that reaches its deadline while it waits fails with DEADLINE_EXCEEDED."""
    first = FakeSampler(end_after=3, failure_mode='stop')
    async with running_fleet(tmp_path, first) as fleet:
        call = fleet.stub.Sample(sample_request(), metadata=ADMIN, timeout=1)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await read_answer(call)
        assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED


async def test_abort_between_two_samplers_ends_the_stream(tmp_path: Path) -> None:
    """A request that is aborted while it waits for another sampler finishes with the spans of its tokens."""
    first = FakeSampler(end_after=3, failure_mode='stop')
    async with running_fleet(tmp_path, first) as fleet:
        call = aiter(fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN))
        responses = [await anext(call) for _ in range(3)]
        await first.is_stopping.wait()
        await fleet.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=ADMIN)
        responses += [response async for response in call]
    assert responses[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
    assert [(span.begin_token, span.end_token) for span in responses[-1].finished.version_spans] == [(0, 2)]


async def test_stream_of_a_checkpoint_is_not_continued(tmp_path: Path) -> None:
    """A stream from a checkpoint path fails with a retry time, because the path may name other weights later."""
    path = 'twinkle://run/weights/last'
    first, second = FakeSampler(end_after=3, failure_mode='unreachable'), FakeSampler()
    async with running_fleet(tmp_path, first, second) as fleet:
        for sampler in (first, second):
            sampler.versions = {'': {0}}
        first.end_after, second.end_after, second.failure_mode = 3, 3, 'unreachable'
        request = sample_request(adapter=sampling_pb2.AdapterRef(checkpoint_path=path))
        failure = await failure_of(fleet.stub.Sample(request, metadata=ADMIN))
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
        assert failure.retry_seconds
        assert len(first.calls) + len(second.calls) == 1
