"""Many streams on one sampler, and readers that stop reading: all streams finish, and memory is bounded."""

import asyncio
import statistics
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest

from fixtures.published import Published, serving_both
from fixtures.sampler_service import Answer, read_answer, sample_request, tenant
from twinkle.api.sampler.v1 import sampling_pb2

pytestmark = [pytest.mark.asyncio(loop_scope='session'), pytest.mark.timeout(300)]

ALICE = tenant('alice')
STREAMS = {'vllm': 1000, 'torch': 250}
"""Number of concurrent streams per engine; the torch engine is slower."""
TOKENS = 16
GROWTH_LIMIT_BYTES = 256 << 20
"""Approximate limit, which a thousand streams with unbounded buffers would exceed."""


def memory_bytes() -> int:
    """Return the resident memory of this process and its children."""
    here, total = psutil.Process(), 0
    for process in [here, *here.children(recursive=True)]:
        with suppress(psutil.NoSuchProcess):
            total += process.memory_info().rss
    return total


class TimedCall:
    """A stream that records the time of its first token."""

    def __init__(self, call: Any) -> None:
        self._call, self._begin = call, time.perf_counter()
        self.first_token_seconds = 0.0

    async def __aiter__(self):
        async for response in self._call:
            if not self.first_token_seconds and response.HasField('delta'):
                self.first_token_seconds = time.perf_counter() - self._begin
            yield response


async def sample(running: Published, index: int) -> tuple[Answer, float]:
    """Sample from the base model or one of two versions; return the answer and the time until its first token."""
    version = index % 3
    reference = sampling_pb2.AdapterRef(adapter_id='ad-1', exact=version) if version else None
    request = sample_request(reference, params={'max_tokens': TOKENS, 'seed': index})
    call = TimedCall(running.sampler.stub.Sample(request, metadata=ALICE))
    answer = await read_answer(call)
    return answer, call.first_token_seconds


@pytest.mark.slow
async def test_many_streams_finish_in_bounded_memory(real_engine, tmp_path: Path, record_property):
    """Concurrent streams, 1000 on vLLM and 250 on torch, get all tokens of the requested version in bounded memory."""
    count = STREAMS[real_engine.facts.engine]
    async with serving_both(real_engine, tmp_path, max_resident_versions=4, queue_length=count) as running:
        for version in (1, 2):
            await running.publish(version)
        await asyncio.gather(*(sample(running, index) for index in range(32)))
        before, begin = memory_bytes(), time.perf_counter()
        answers = await asyncio.gather(*(sample(running, index) for index in range(count)))
        seconds, growth = time.perf_counter() - begin, memory_bytes() - before
    for index, (answer, _) in enumerate(answers):
        assert answer.spans == [[(index % 3, 0, TOKENS)]]
        assert len(answer.tokens[0]) == TOKENS
    assert growth < GROWTH_LIMIT_BYTES
    waits = statistics.quantiles([wait for _, wait in answers], n=100)
    record_property('first token p50 [s]', round(waits[49], 2))
    record_property('p99 [s]', round(waits[98], 2))
    record_property('all [s]', round(seconds, 2))
    record_property('memory growth [MiB]', growth >> 20)


async def test_unread_streams_do_not_delay_others(real_engine, tmp_path: Path):
    """Twelve unread streams do not block other streams, and are complete when they are read."""
    long_request = sample_request(params={'max_tokens': 200, 'seed': 1})
    async with serving_both(real_engine, tmp_path, queue_length=64) as running:
        idle = [running.sampler.stub.Sample(long_request, metadata=ALICE) for _ in range(12)]
        for call in idle:
            await call.initial_metadata()
        quick = [await sample(running, 3 * index) for index in range(4)]
        assert all(len(answer.tokens[0]) == TOKENS for answer, _ in quick)
        before = memory_bytes()
        answers = await asyncio.gather(*(read_answer(call) for call in idle))
        assert memory_bytes() - before < GROWTH_LIMIT_BYTES
    assert {len(answer.tokens[0]) for answer in answers} == {200}
    assert len({tuple(answer.tokens[0]) for answer in answers}) == 1
