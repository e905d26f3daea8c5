"""Tests of the queue of a gateway whose samplers are full: fair order, aborts, and failover of waiting requests."""

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
"""Number of sequences that the sampler runs at a time."""
SENT_COUNT = 5
"""Number of requests that the gateway sends to the sampler before it queues requests."""
Metadata = tuple[tuple[str, str], ...]


def small_sampler() -> FakeSampler:
    """Return a sampler that reports a capacity of four sequences and sends no tokens until its gate opens."""
    sampler = FakeSampler(load=engine_pb2.EngineLoad(max_sequence_count=CAPACITY))
    sampler.gate.clear()
    return sampler


def start_sample(fleet: RunningFleet, metadata: Metadata, request: Any) -> 'asyncio.Future[Any]':
    """Send a request, and return the task that reads its answer."""
    return asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=metadata)))


def requests_of(count: int) -> list[Any]:
    """Return requests with distinct prompts and ids."""
    return [sample_request([number], request_id=f'rq-{number}') for number in range(count)]


async def abort(fleet: RunningFleet, request_id: str, metadata: Metadata = ADMIN) -> None:
    """Abort a request as soon as the gateway has registered it."""
    while True:
        try:
            await fleet.stub.Abort(wire.AbortRequest(request_id=request_id), metadata=metadata)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
        else:
            return


async def test_tenants_alternate_at_a_full_sampler(tmp_path: Path) -> None:
    """Waiting requests of two tenants alternate, although one tenant sent all its requests first."""
    sampler = small_sampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        bob = bearer((await fleet.gateway.make_key('bob')).secret)
        default_requests = requests_of(30)
        samples = [start_sample(fleet, ADMIN, request) for request in default_requests]
        await until(lambda: sampler.open_streams == SENT_COUNT)
        bob_requests = requests_of(10)
        others = [start_sample(fleet, bob, request) for request in bob_requests]
        # A tenant without running requests never waits.
        await until(lambda: sampler.open_streams == SENT_COUNT + 1)
        # Once the gateway has registered a later request of `bob`, it has registered all earlier ones.
        later = asyncio.ensure_future(_read_all(fleet.stub.Sample(sample_request(request_id='later'), metadata=bob)))
        await abort(fleet, 'later', bob)
        await later
        sampler.gate.set()
        for request, response in zip(
            [*default_requests, *bob_requests], await asyncio.gather(*samples, *others), strict=True
        ):
            assert response.tokens == undisturbed(request)
        tenant_ids = [caller.tenant_id for caller in sampler.callers]
        while tenant_ids and tenant_ids[-1] == 'default':
            tenant_ids.pop()
        # Before `bob`'s last request, the other tenant's first requests ran, and then the tenants alternated.
        assert Counter(tenant_ids)['default'] <= SENT_COUNT + Counter(tenant_ids)['bob'] + 2


async def test_waiting_request_is_aborted_without_a_sampler(tmp_path: Path) -> None:
    """Waiting streams and batches that are aborted finish without reaching a sampler."""
    sampler = small_sampler()
    async with running_fleet(tmp_path, sampler) as fleet:
        running = [start_sample(fleet, ADMIN, request) for request in requests_of(SENT_COUNT)]
        await until(lambda: sampler.open_streams == SENT_COUNT)
        waiting = asyncio.ensure_future(
            _read_all(fleet.stub.Sample(sample_request(request_id='stream'), metadata=ADMIN))
        )
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(3)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts, request_id='batch')
        responses = asyncio.ensure_future(_read_all(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        for request_id in ('stream', 'batch'):
            await abort(fleet, request_id)
        assert (await waiting)[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
        assert [len(response.sequences) for response in await responses] == [1, 1, 1]
        assert sampler.calls.count('Sample') == SENT_COUNT
        assert 'SampleBatch' not in sampler.calls
        sampler.gate.set()
        await asyncio.gather(*running)


async def test_waiting_requests_run_elsewhere_when_their_sampler_leaves(tmp_path: Path) -> None:
    """If a sampler is drained, its waiting requests run once on another sampler, and its running requests finish."""
    leaving = small_sampler()
    async with running_fleet(tmp_path, leaving) as fleet:
        requests = requests_of(SENT_COUNT + 6)
        samples = [start_sample(fleet, ADMIN, request) for request in requests]
        await until(lambda: leaving.open_streams == SENT_COUNT)
        async with FakeSampler().serving() as other:
            await fleet.join(other, 'other')
            await fleet.fleet.Drain(fleet_service_pb2.DrainRequest(replica_id='r0'), metadata=ADMIN)
            await until(lambda: len(other.requests) == len(requests) - SENT_COUNT)
            leaving.gate.set()
            for request, response in zip(requests, await asyncio.gather(*samples), strict=True):
                assert response.tokens == undisturbed(request)
            assert len(leaving.requests) == SENT_COUNT


async def test_batch_frees_slots_as_it_finishes(tmp_path: Path) -> None:
    """A request waits while a batch fills the sampler, and runs once prompts of the batch are finished."""
    sampler = small_sampler()
    sampler.prompt_gate.clear()
    async with running_fleet(tmp_path, sampler) as fleet:
        prompts = [sampling_pb2.Prompt(token_ids=ints([number])) for number in range(8)]
        batch = wire.SampleBatchRequest(base_model='tiny', prompts=prompts)
        responses = asyncio.ensure_future(_read_all(fleet.stub.SampleBatch(batch, metadata=ADMIN)))
        await until(lambda: len(sampler.requests) == 1)
        waiting = start_sample(fleet, ADMIN, requests_of(1)[0])
        later = asyncio.ensure_future(_read_all(fleet.stub.Sample(sample_request(request_id='later'), metadata=ADMIN)))
        # Once the gateway has registered the later request, it has registered the earlier one and sent neither.
        await abort(fleet, 'later')
        await later
        assert 'Sample' not in sampler.calls
        sampler.prompt_gate.set()
        sampler.gate.set()
        await asyncio.gather(waiting, responses)
        assert len(responses.result()) == 8


async def _read_all(call: Any) -> list[Any]:
    return [response async for response in call]
