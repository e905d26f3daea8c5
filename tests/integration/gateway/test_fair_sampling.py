"""More requests than a sampler runs at once: fair order, aborts, and failover of waiting requests."""

import asyncio
from collections import Counter
from pathlib import Path
from typing import Any

import grpc

from fixtures.fake_samplers import FakeSampler, until
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, bearer
from fixtures.sampled_answers import ints, read_answer, sample_request, undisturbed
from twinkle.api.gateway.v1 import fleet_service_pb2
from twinkle.api.sampler.v1 import engine_pb2, sampling_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire

CAPACITY = 4
SENT = 5
"""Requests that the gateway sends to a sampler of that capacity, with its slack."""
Metadata = tuple[tuple[str, str], ...]


def small_sampler() -> FakeSampler:
    """Return a sampler that reports a capacity of four sequences and holds them until its gate opens."""
    sampler = FakeSampler(load=engine_pb2.EngineLoad(max_sequence_count=CAPACITY))
    sampler.gate.clear()
    return sampler


def start_sample(fleet: RunningFleet, metadata: Metadata, request: Any) -> 'asyncio.Future[Any]':
    """Start a task that reads a sample."""
    return asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=metadata)))


def requests_of(count: int) -> list[Any]:
    """Return requests with separate prompts and ids."""
    return [sample_request([number], request_id=f'rq-{number}') for number in range(count)]


async def abort(fleet: RunningFleet, request_id: str) -> None:
    """Abort a request as soon as the gateway knows it."""
    while True:
        try:
            await fleet.stub.Abort(wire.AbortRequest(request_id=request_id), metadata=ADMIN)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        else:
            return


async def test_tenants_alternate_at_a_full_sampler(tmp_path: Path) -> None:
    """Waiting requests of two tenants alternate, though one tenant sent all of its requests first."""
    sampler = small_sampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        bob = bearer((await fleet.gateway.make_key('bob')).secret)
        many = requests_of(30)
        samples = [start_sample(fleet, ADMIN, request) for request in many]
        await until(lambda: sampler.open_streams == SENT)
        few = requests_of(10)
        others = [start_sample(fleet, bob, request) for request in few]
        # A tenant without running requests never waits.
        await until(lambda: sampler.open_streams == SENT + 1)
        sampler.gate.set()
        for request, answer in zip([*many, *few], await asyncio.gather(*samples, *others), strict=True):
            assert answer.tokens == undisturbed(request)
        turns = [caller.tenant_id for caller in sampler.callers]
        while turns and turns[-1] == 'default':
            turns.pop()
        # Before the last request of `bob`, the first requests of the other tenant ran, and then the tenants alternated.
        assert Counter(turns)['default'] <= SENT + Counter(turns)['bob'] + 2


async def test_waiting_request_is_aborted_without_a_sampler(tmp_path: Path) -> None:
    """A waiting request that is aborted ends at once without reaching a sampler, as a stream and as a batch."""
    sampler = small_sampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        running = [start_sample(fleet, ADMIN, request) for request in requests_of(SENT)]
        await until(lambda: sampler.open_streams == SENT)
        waiting = asyncio.ensure_future(_read(fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN)))
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(3)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts, request_id='ours')
        answers = asyncio.ensure_future(_read(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        for request_id in ('mine', 'ours'):
            await abort(fleet, request_id)
        assert (await waiting)[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
        assert [len(answer.sequences) for answer in await answers] == [1, 1, 1]
        assert sampler.calls.count('Sample') == SENT
        assert 'SampleBatch' not in sampler.calls
        sampler.gate.set()
        await asyncio.gather(*running)


async def test_waiting_requests_move_when_their_sampler_leaves(tmp_path: Path) -> None:
    """Waiting requests of a sampler that leaves run on another one, once each, and running ones stay."""
    leaving = small_sampler()
    async with running_fleet(tmp_path, leaving) as fleet:
        requests = requests_of(SENT + 6)
        samples = [start_sample(fleet, ADMIN, request) for request in requests]
        await until(lambda: leaving.open_streams == SENT)
        async with FakeSampler().serving() as other:
            await fleet.join(other, 'other')
            await fleet.fleet.Drain(fleet_service_pb2.DrainRequest(replica_id='r0'), metadata=ADMIN)
            await until(lambda: len(other.requests) == len(requests) - SENT)
            leaving.gate.set()
            for request, answer in zip(requests, await asyncio.gather(*samples), strict=True):
                assert answer.tokens == undisturbed(request)
            assert len(leaving.requests) == SENT


async def test_batch_frees_slots_as_it_finishes(tmp_path: Path) -> None:
    """Waiting requests start as soon as enough prompts of a batch are finished."""
    sampler = small_sampler()
    sampler.prompt_gate.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(8)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts)
        answers = asyncio.ensure_future(_read(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        await until(lambda: len(sampler.requests) == 1)
        waiting = start_sample(fleet, ADMIN, requests_of(1)[0])
        later = asyncio.ensure_future(_read(fleet.stub.Sample(sample_request(request_id='later'), metadata=ADMIN)))
        # When the gateway knows the later request, it knows the earlier one, and has sent neither.
        await abort(fleet, 'later')
        await later
        assert 'Sample' not in sampler.calls
        sampler.prompt_gate.set()
        sampler.gate.set()
        await asyncio.gather(waiting, answers)
        assert len(answers.result()) == 8


async def _read(call: Any) -> list[Any]:
    return [answer async for answer in call]
