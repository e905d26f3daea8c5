"""More requests than a sampler runs at once: fair order, aborts, and failover of the waiting ones."""

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

PLACES = 4
THERE = 5
"""Requests at a sampler of that capacity, with the slack."""
Metadata = tuple[tuple[str, str], ...]


def small_sampler() -> FakeSampler:
    """Return a sampler that reports a capacity of four sequences and holds them until its gate opens."""
    sampler = FakeSampler(load=engine_pb2.EngineLoad(max_sequence_count=PLACES))
    sampler.gate.clear()
    return sampler


def ask(fleet: RunningFleet, metadata: Metadata, request: Any) -> 'asyncio.Future[Any]':
    """Start to read a sample."""
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
        greedy = requests_of(30)
        asked = [ask(fleet, ADMIN, request) for request in greedy]
        await until(lambda: sampler.open_streams == THERE)
        modest = requests_of(10)
        others = [ask(fleet, bob, request) for request in modest]
        # A tenant without slots never waits.
        await until(lambda: sampler.open_streams == THERE + 1)
        sampler.gate.set()
        for request, answer in zip([*greedy, *modest], await asyncio.gather(*asked, *others), strict=True):
            assert answer.tokens == undisturbed(request)
        turns = [caller.tenant_id for caller in sampler.callers]
        while turns and turns[-1] == 'default':
            turns.pop()
        # Before the last request of the modest tenant, the first ones of the other ran, then they alternated.
        assert Counter(turns)['default'] <= THERE + Counter(turns)['bob'] + 2


async def test_waiting_request_is_aborted_without_a_sampler(tmp_path: Path) -> None:
    """A waiting request that is aborted ends at once without reaching a sampler, as a stream and as a batch."""
    sampler = small_sampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        running = [ask(fleet, ADMIN, request) for request in requests_of(THERE)]
        await until(lambda: sampler.open_streams == THERE)
        waiting = asyncio.ensure_future(_read(fleet.stub.Sample(sample_request(request_id='mine'), metadata=ADMIN)))
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(3)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts, request_id='ours')
        answers = asyncio.ensure_future(_read(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        for request_id in ('mine', 'ours'):
            await abort(fleet, request_id)
        assert (await waiting)[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
        assert [len(answer.sequences) for answer in await answers] == [1, 1, 1]
        assert sampler.calls.count('Sample') == THERE
        assert 'SampleBatch' not in sampler.calls
        sampler.gate.set()
        await asyncio.gather(*running)


async def test_waiting_requests_move_when_their_sampler_leaves(tmp_path: Path) -> None:
    """Waiting requests of a sampler that leaves run on another one, once each, and running ones stay."""
    leaving = small_sampler()
    async with running_fleet(tmp_path, leaving) as fleet:
        requests = requests_of(THERE + 6)
        asked = [ask(fleet, ADMIN, request) for request in requests]
        await until(lambda: leaving.open_streams == THERE)
        async with FakeSampler().serving() as other:
            await fleet.join(other, 'other')
            await fleet.fleet.Drain(fleet_service_pb2.DrainRequest(replica_id='r0'), metadata=ADMIN)
            await until(lambda: len(other.requests) == len(requests) - THERE)
            leaving.gate.set()
            for request, answer in zip(requests, await asyncio.gather(*asked), strict=True):
                assert answer.tokens == undisturbed(request)
            assert len(leaving.requests) == THERE


async def test_batch_frees_slots_as_it_finishes(tmp_path: Path) -> None:
    """Waiting requests start as soon as enough prompts of a batch are finished."""
    sampler = small_sampler()
    sampler.places.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(8)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts)
        answers = asyncio.ensure_future(_read(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        await until(lambda: len(sampler.requests) == 1)
        waiting = ask(fleet, ADMIN, requests_of(1)[0])
        later = asyncio.ensure_future(_read(fleet.stub.Sample(sample_request(request_id='later'), metadata=ADMIN)))
        # When the gateway knows the later request, it knows the earlier one, and has sent neither.
        await abort(fleet, 'later')
        await later
        assert 'Sample' not in sampler.calls
        sampler.places.set()
        sampler.gate.set()
        await asyncio.gather(waiting, answers)
        assert len(answers.result()) == 8


async def _read(call: Any) -> list[Any]:
    return [answer async for answer in call]
