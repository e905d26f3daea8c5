"""Requests that crash every sampler on which they run, while other requests run on the same samplers."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.fake_samplers import FakeSampler
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, failure_of
from fixtures.sampled_answers import ints, read_answer, sample_request, undisturbed
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.gateway.config import FleetConfig
from twinkle_services.gateway.sampling.suspects import MAX_CONSECUTIVE_FAILURES
from twinkle_services.kit.errors import ServiceUnreachable

POISON = 13
"""First token of a prompt that crashes a sampler."""
SUBMISSIONS = 12
"""Number of times that a client sends the crashing request, which is more than the limit of lost samplers."""
PATIENT = FleetConfig(begin_wait=timedelta(seconds=60))
"""Configuration of a gateway that waits for a replacement, which may join late on a busy machine."""


@dataclass
class _Restarts:
    """Samplers that are replaced when they stop."""

    fleet: RunningFleet
    stack: AsyncExitStack
    poison_mode: str = 'stop'
    crash_count: int = 0
    samplers: list[FakeSampler] = field(default_factory=list[FakeSampler])
    has_joined: asyncio.Event = field(default_factory=asyncio.Event)
    """Set once a sampler has joined the fleet. Before that, the gateway refuses requests instead of waiting."""

    async def keep_running(self, number: int) -> None:
        while True:
            sampler = await self.stack.enter_async_context(
                FakeSampler(poison=POISON, poison_mode=self.poison_mode).serving()
            )
            await self.fleet.join(sampler, f'{number}-{self.crash_count}')
            self.samplers.append(sampler)
            self.has_joined.set()
            await sampler.is_stopping.wait()
            self.crash_count += 1


@asynccontextmanager
async def _restarting_samplers(fleet: RunningFleet, count: int, poison_mode: str = 'stop') -> AsyncIterator[_Restarts]:
    async with AsyncExitStack() as stack:
        restarts = _Restarts(fleet, stack, poison_mode)
        tasks = [asyncio.create_task(restarts.keep_running(number)) for number in range(count)]
        try:
            await restarts.has_joined.wait()
            yield restarts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _calls(fleet: RunningFleet, kind: str, prompt: list[int]) -> Any:
    """Return a new call of a kind; the client sends no request id."""
    if kind == 'stream':
        return fleet.stub.Sample(sample_request(prompt), metadata=ADMIN)
    if kind == 'score':
        scoring = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints(prompt)])
        return fleet.stub.ComputeLogprobs(scoring, metadata=ADMIN)
    params = sampling_pb2.SamplingParams(max_tokens=4)
    request = wire.SampleBatchRequest(
        base_model='tiny', prompts=[sampling_pb2.Prompt(token_ids=ints(prompt))], params=params
    )
    return fleet.stub.SampleBatch(request, metadata=ADMIN)


async def _submit_until_refused(fleet: RunningFleet, kind: str) -> list[Any]:
    """Send the crashing request `SUBMISSIONS` times, and return the code and reason of each failure."""
    failures = [await failure_of(_calls(fleet, kind, [POISON, 1])) for _ in range(SUBMISSIONS)]
    return [(failure.code, failure.reason) for failure in failures]


@pytest.mark.timeout(120)
@pytest.mark.parametrize('kind', ['stream', 'batch', 'score'])
@pytest.mark.parametrize('poison_mode', ['stop', 'engine'])
@pytest.mark.parametrize('sampler_count', [1, 3])
async def test_request_that_crashes_samplers_fails(
    tmp_path: Path, kind: str, poison_mode: str, sampler_count: int
) -> None:
    """A request crashes a bounded number of samplers however often it is sent, and other requests succeed."""
    async with (
        running_fleet(tmp_path, fleet=PATIENT) as fleet,
        _restarting_samplers(fleet, sampler_count, poison_mode) as restarts,
    ):
        requests = [sample_request([index, 7], max_tokens=6, count=2) for index in range(20, 26)]
        reading = [
            asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=ADMIN), 2)) for request in requests
        ]
        outcomes = await _submit_until_refused(fleet, kind)
        assert outcomes[-1] == (grpc.StatusCode.FAILED_PRECONDITION, 'REQUEST_CRASHED')
        assert restarts.crash_count <= MAX_CONSECUTIVE_FAILURES
        answers = await asyncio.gather(*reading)
        assert [answer.tokens for answer in answers] == [undisturbed(request) for request in requests]


@pytest.mark.timeout(120)
async def test_requests_together_with_a_crashing_one_all_succeed(tmp_path: Path) -> None:
    """Requests that repeatedly start together with a crashing request are never identified as the cause."""
    async with running_fleet(tmp_path, fleet=PATIENT) as fleet, _restarting_samplers(fleet, 1) as restarts:
        crashing = asyncio.create_task(_submit_until_refused(fleet, 'stream'))
        number = 100
        while not crashing.done():
            number += 4
            requests = [sample_request([number + index, 7], max_tokens=3) for index in range(4)]
            answers = await asyncio.gather(
                *(read_answer(fleet.stub.Sample(request, metadata=ADMIN)) for request in requests)
            )
            assert [answer.tokens for answer in answers] == [undisturbed(request) for request in requests]
        assert (await crashing)[-1][1] == 'REQUEST_CRASHED'
        assert restarts.crash_count <= MAX_CONSECUTIVE_FAILURES


@pytest.mark.timeout(120)
async def test_failures_between_successes_do_not_count(tmp_path: Path) -> None:
    """A request that succeeds after each lost sampler never fails, and neither does a scoring request."""
    request = sample_request([5, 6, 7], max_tokens=3)
    scoring = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints([5, 6, 7])])
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        for number in range(2 * MAX_CONSECUTIVE_FAILURES):
            async with FakeSampler(end_after=0, failure_mode='stop').serving() as failing:
                await fleet.join(failing, f'failing-{number}')
                for _ in range(2):
                    answer = await read_answer(fleet.stub.Sample(request, metadata=ADMIN))
                    assert answer.tokens == undisturbed(request)
                    assert (await fleet.stub.ComputeLogprobs(scoring, metadata=ADMIN)).sequences


async def test_unreachable_service_behind_the_samplers_is_never_counted_as_a_crash(tmp_path: Path) -> None:
    """A request fails with a retryable error while the samplers cannot reach another service, and then succeeds."""
    samplers = [FakeSampler(refusal=ServiceUnreachable('checkpoint')) for _ in range(2)]
    async with running_fleet(tmp_path, *samplers) as fleet:
        for _ in range(2 * MAX_CONSECUTIVE_FAILURES):
            failure = await failure_of(fleet.stub.Sample(sample_request(), metadata=ADMIN))
            assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'SERVICE_UNREACHABLE')
        for sampler in samplers:
            sampler.refusal = None
        answer = await read_answer(fleet.stub.Sample(sample_request(), metadata=ADMIN))
        assert answer.tokens == undisturbed(sample_request())
