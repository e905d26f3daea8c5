"""Requests that crash every sampler which runs them, beside requests of other tenants."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.fake_samplers import FakeSampler
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.running_gateway import ADMIN, failure_of
from fixtures.sampled_answers import ints, read_answer, sample_request, undisturbed
from services.gateway.sampling.dispatch import MAX_CONSECUTIVE_FAILURES
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2

POISON = 13
SUBMISSIONS = 12
"""Number of times that a client sends the request again, more than the samplers may be lost."""


@dataclass
class _Restarts:
    """Samplers that are replaced when they stop."""

    fleet: RunningFleet
    stack: AsyncExitStack
    crash_count: int = 0
    samplers: list[FakeSampler] = field(default_factory=list[FakeSampler])

    async def keep_running(self, number: int) -> None:
        while True:
            sampler = await self.stack.enter_async_context(FakeSampler(poison=POISON).serving())
            await self.fleet.join(sampler, f'{number}-{self.crash_count}')
            self.samplers.append(sampler)
            await sampler.is_stopping.wait()
            self.crash_count += 1


@asynccontextmanager
async def _restarting_samplers(fleet: RunningFleet, count: int) -> AsyncIterator[_Restarts]:
    async with AsyncExitStack() as stack:
        restarts = _Restarts(fleet, stack)
        tasks = [asyncio.create_task(restarts.keep_running(number)) for number in range(count)]
        try:
            yield restarts
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _calls(fleet: RunningFleet, kind: str, prompt: list[int]) -> Any:
    """Return a new call of a kind; each call of a client has another request id."""
    if kind == 'stream':
        return fleet.stub.Sample(sample_request(prompt), metadata=ADMIN)
    params = sampling_pb2.SamplingParams(max_tokens=4)
    request = wire.SampleBatchRequest(
        base_model='tiny', prompts=[sampling_pb2.Prompt(token_ids=ints(prompt))], params=params
    )
    return fleet.stub.SampleBatch(request, metadata=ADMIN)


async def _submit_until_refused(fleet: RunningFleet, kind: str) -> list[Any]:
    """Send the poisoned request again while the errors are temporary, and a few times after that."""
    failures = [await failure_of(_calls(fleet, kind, [POISON, 1])) for _ in range(SUBMISSIONS)]
    return [(failure.code, failure.reason) for failure in failures]


@pytest.mark.timeout(120)
@pytest.mark.parametrize('kind', ['stream', 'batch'])
@pytest.mark.parametrize('sampler_count', [1, 3])
async def test_request_that_crashes_samplers_fails(tmp_path: Path, kind: str, sampler_count: int) -> None:
    """A request crashes a bounded number of samplers however often it is sent, and other requests still succeed."""
    async with running_fleet(tmp_path) as fleet, _restarting_samplers(fleet, sampler_count) as restarts:
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
async def test_requests_beside_a_crashing_one_all_succeed(tmp_path: Path) -> None:
    """Requests that start at the same time as a crashing one, again and again, are never taken for the cause."""
    async with running_fleet(tmp_path) as fleet, _restarting_samplers(fleet, 1) as restarts:
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
