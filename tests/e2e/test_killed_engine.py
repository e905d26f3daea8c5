"""vLLM's engine core is killed while a real sampler runs requests; `twinkle up` restarts the sampler."""

import asyncio
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.running_gateway import failure_of
from fixtures.sampled_answers import numbers, read_answer
from fixtures.sampler_engines import need_vllm
from fixtures.supervised_vllm import SupervisedVllm, supervised_vllm
from fixtures.tiny_model import build_tiny_model
from twinkle_services.gateway.sampling.suspects import MAX_CONSECUTIVE_FAILURES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PROMPT, POISON = [1, 40, 41, 42], [1, 50, 51, 52]
"""Prompts of a normal request, and of the request during which the engine is killed."""
LENGTH = 400
"""Number of tokens of the streamed answer."""


async def _read(call: Any, received: list[int]) -> list[int]:
    """Record the tokens of a stream as they arrive, and return them at its end."""
    async for response in call:
        if response.HasField('delta'):
            received += numbers(response.delta.token_ids)
    return received


async def _persistent_answer(up: SupervisedVllm, secret: str) -> list[int]:
    """Return the answer to a short request, which is repeated while no sampler is available."""
    while True:
        try:
            return (await read_answer(up.sample(secret, PROMPT, max_tokens=8))).tokens[0]
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.UNAVAILABLE:
                raise
            await up.pause()


async def _kill_during(up: SupervisedVllm, secret: str) -> tuple[grpc.StatusCode, str]:
    """Kill the engine during the first step of a request; return the error that the caller gets."""
    cores = await up.cores_of_ready_sampler()
    await up.until_idle()
    for process in cores:
        process.suspend()
    failing = asyncio.create_task(failure_of(up.sample(secret, POISON, max_tokens=8)))
    await up.until_sampling()
    for process in cores:
        process.kill()
    failure = await failing
    return failure.code, failure.reason


async def test_kills_of_the_engine_fail_only_the_request_that_causes_them(tmp_path: Path) -> None:
    """A stream continues after a kill of the engine; a request that is running at each of several kills is refused.

    The requests of another tenant succeed after each kill.
    """
    need_vllm()
    async with supervised_vllm(build_tiny_model(tmp_path / 'model'), tmp_path) as up:
        culprit, innocent = up.make_key('mallory'), up.make_key('alice')
        others = up.other_services()
        expected = await _read(up.sample(innocent, PROMPT, max_tokens=LENGTH), [])
        received: list[int] = []
        reading = asyncio.create_task(_read(up.sample(innocent, PROMPT, max_tokens=LENGTH), received))
        await up.until(lambda: bool(received) or reading.done())
        for process in up.cores():
            process.kill()
        assert len(received) < LENGTH
        assert await reading == expected

        outcomes: list[tuple[grpc.StatusCode, str]] = []
        for _ in range(MAX_CONSECUTIVE_FAILURES):
            outcomes.append(await _kill_during(up, culprit))
            assert await _persistent_answer(up, innocent) == expected[:8]
        assert [code for code, _ in outcomes[:-1]] == [grpc.StatusCode.UNAVAILABLE] * (MAX_CONSECUTIVE_FAILURES - 1)
        assert outcomes[-1] == (grpc.StatusCode.FAILED_PRECONDITION, 'REQUEST_CRASHED')

        cores = await up.cores_of_ready_sampler()
        for _ in range(2):
            refusal = await failure_of(up.sample(culprit, POISON, max_tokens=8))
            assert refusal.reason == 'REQUEST_CRASHED'
        assert await _persistent_answer(up, innocent) == expected[:8]
        assert all(process.is_running() for process in cores)
        assert up.other_services() == others
