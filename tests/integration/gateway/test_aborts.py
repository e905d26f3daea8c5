"""Tests of requests that are aborted at different stages of their execution."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.fake_samplers import FakeSampler, until
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, Failure
from fixtures.sampled_answers import ints, sample_request
from twinkle.api.gateway.v1.fleet_service_pb2 import REPLICA_STATE_LOST
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2

ABORTED = sampling_pb2.STOP_REASON_ABORT


def batch_request(count: int, **fields: Any) -> wire.SampleBatchRequest:
    """Return a valid batch with the id 'mine' and two completions per prompt."""
    prompts = [sampling_pb2.Prompt(token_ids=ints([index])) for index in range(count)]
    params = sampling_pb2.SamplingParams(max_tokens=3, sample_count=2)
    return wire.SampleBatchRequest(base_model='tiny', prompts=prompts, params=params, request_id='mine', **fields)


async def abort(fleet: RunningFleet) -> None:
    """Abort the request with the id 'mine'."""
    await fleet.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=ADMIN)


def assert_aborted(responses: list[Any], count: int) -> None:
    """Assert that every prompt has one result with two aborted completions."""
    assert sorted(response.prompt_index for response in responses) == list(range(count))
    for response in responses:
        assert [sequence.stop_reason for sequence in response.sequences] == [ABORTED] * 2
        assert response.prompt.token_ids == ints([response.prompt_index])


async def test_batch_is_aborted_while_its_version_is_resolved(tmp_path: Path) -> None:
    """A batch that is aborted while its version is resolved finishes without being sent to a sampler."""
    sampler = FakeSampler(versions={'ad': {1}})
    async with running_fleet(tmp_path, sampler) as fleet:
        sampler.call_gate.clear()
        request = batch_request(3, adapter=sampling_pb2.AdapterRef(adapter_id='ad'))
        read_task = asyncio.ensure_future(_read_all(fleet.stub.SampleBatch(request, metadata=ADMIN)))
        await until(lambda: 'LoadAdapter' in sampler.calls)
        await abort(fleet)
        assert_aborted(await read_task, 3)
        assert 'SampleBatch' not in sampler.calls


@pytest.mark.parametrize('count', [1, 6])
async def test_batch_is_aborted_before_samplers_know_it(tmp_path: Path, count: int) -> None:
    """An abort is sent again to samplers that have not registered their part of the batch yet."""
    samplers = [FakeSampler(), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        for sampler in samplers:
            sampler.call_gate.clear()
            sampler.prompt_gate.clear()
        request = batch_request(count)
        read_task = asyncio.ensure_future(_read_all(fleet.stub.SampleBatch(request, metadata=ADMIN)))
        await until(lambda: any('SampleBatch' in sampler.calls for sampler in samplers))
        abort_task = asyncio.ensure_future(abort(fleet))
        await until(lambda: any('Abort' in sampler.calls for sampler in samplers))
        for sampler in samplers:
            sampler.call_gate.set()
        await abort_task
        assert_aborted(await read_task, count)
        assert all(sampler.aborted for sampler in samplers if 'SampleBatch' in sampler.calls)


async def test_stream_is_aborted_before_its_sampler_knows_it(tmp_path: Path) -> None:
    """An abort is sent again to a sampler that has not registered the request yet."""
    sampler = FakeSampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        sampler.call_gate.clear()
        sampler.gate.clear()
        call = fleet.stub.Sample(sample_request(request_id='mine', max_tokens=50), metadata=ADMIN)
        read_task = asyncio.ensure_future(_read_all(call))
        await until(lambda: 'Sample' in sampler.calls)
        abort_task = asyncio.ensure_future(abort(fleet))
        await until(lambda: 'Abort' in sampler.calls)
        sampler.call_gate.set()
        await abort_task
        assert (await read_task)[-1].finished.stop_reason == ABORTED
        assert sampler.sent_count < 5


async def test_waiting_requests_are_aborted(tmp_path: Path) -> None:
    """Requests that wait for a sampler, new or already started, finish when they are aborted."""
    first = FakeSampler(end_after=0, failure_mode='stop')
    async with running_fleet(tmp_path, first) as fleet:
        call = fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN)
        read_task = asyncio.ensure_future(_read_all(call))
        await first.is_stopping.wait()
        fleet.leases[0].call.cancel()
        await fleet.until_state('r0', REPLICA_STATE_LOST)
        await abort(fleet)
        assert (await read_task)[-1].finished.stop_reason == ABORTED
        read_task = asyncio.ensure_future(_read_all(fleet.stub.SampleBatch(batch_request(2), metadata=ADMIN)))
        await _abort_once_known(fleet)
        assert_aborted(await read_task, 2)


async def _read_all(call: Any) -> list[Any]:
    return [response async for response in call]


async def _abort_once_known(fleet: RunningFleet) -> None:
    """Abort the request as soon as the gateway has registered it."""
    while True:
        try:
            await abort(fleet)
            return
        except grpc.aio.AioRpcError as error:
            if Failure.of(error).reason != 'REQUEST_NOT_FOUND':
                raise
