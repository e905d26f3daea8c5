"""Many streams and large batches: memory is bounded and every request finishes exactly once."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from fixtures.sampler_service import (
    FakeWeightSource,
    RunningSampler,
    ints,
    numbers,
    read_answer,
    sample_request,
    serving_sampler,
    tenant,
)
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.data_format import SamplingParams
from twinkle.sampler.engine import EngineConfig
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle_services.sampler.domain.generation import GenerationRequest

ALICE = tenant('alice')
STREAMS = 200
MAILBOX = 8
PROMPTS = 1000


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[TorchEngine]:
    """An engine with slots for all streams and small buffers for unread events."""
    limits = EngineConfig(max_sequences=STREAMS, max_batch_tokens=512, prefill_chunk_tokens=32)
    folder = str(tiny_llama_dir)
    created = TorchEngine(TorchEngineOptions(base_model='tiny', folder=folder, limits=limits, mailbox_events=MAILBOX))
    yield created
    await created.close()


@pytest.fixture
async def sampler(engine: TorchEngine, tmp_path: Path) -> AsyncIterator[RunningSampler]:
    """A sampler service with `engine`."""
    async with serving_sampler(engine, FakeWeightSource(), tmp_path, queue_length=2 * PROMPTS) as running:
        yield running


def request_of(number: int) -> GenerationRequest:
    """Return a request for 40 tokens."""
    params = SamplingParams(max_tokens=40, ignore_eos=True, seed=number)
    return GenerationRequest(request_id=str(number), prompt_token_ids=(1, 40 + number), params=params)


async def test_slow_readers_keep_memory_bounded(engine):
    """Unread streams stop after a few events each, and are complete when they are read again."""
    streams = [engine.generate(request_of(number)) for number in range(STREAMS)]
    for stream in streams:
        await anext(stream)
    while engine.load.running_sequences < STREAMS or engine.step_rows:
        await engine.abort('unknown')
    # One step may add an event to a full buffer, and the reader has read one event.
    assert engine.buffered_events <= STREAMS * (MAILBOX + 1)
    remaining = [[event async for event in stream] for stream in streams[:20]]
    # 40 token events and the last event; the prompt event was read before.
    assert {len(events) for events in remaining} == {41}
    for stream in streams[20:]:
        await stream.aclose()
    while engine.load.running_sequences:
        await engine.abort('unknown')
    assert engine.buffered_events == 0


async def test_thousand_streams_finish(sampler):
    """A thousand streams finish and leave no buffered events, although most must wait for a slot."""
    calls = [
        sampler.stub.Sample(sample_request(params={'max_tokens': 4, 'seed': number}), metadata=ALICE)
        for number in range(PROMPTS)
    ]
    answers = await asyncio.gather(*(read_answer(call) for call in calls))
    assert {len(answer.tokens[0]) for answer in answers} == {4}
    # The last event arrives before the engine has freed the slot of its sequence.
    while sampler.engine.load.running_sequences:
        await sampler.engine.abort('unknown')
    assert sampler.engine.buffered_events == 0


async def test_batch_of_a_thousand_prompts_finishes_each_once(sampler):
    """Each prompt has one result, a long prompt does not finish first, and equal prompts have equal tokens."""
    prompts = [sampling_pb2.Prompt(token_ids=ints([1, 3 + number % 300, 7])) for number in range(PROMPTS)]
    prompts[0] = sampling_pb2.Prompt(token_ids=ints([1] * 400))
    request = wire.SampleBatchRequest(
        base_model='tiny',
        prompts=prompts,
        params=sampling_pb2.SamplingParams(max_tokens=3, seed=1, is_eos_ignored=True),
    )
    order: list[int] = []
    tokens: dict[int, list[int]] = {}
    async for response in sampler.stub.SampleBatch(request, metadata=ALICE):
        order.append(response.prompt_index)
        tokens[response.prompt_index] = numbers(response.sequences[0].token_ids)
    assert sorted(order) == list(range(PROMPTS))
    assert order.index(0) > 0
    assert {len(sampled) for sampled in tokens.values()} == {3}
    assert tokens[5] == tokens[305] == tokens[605]
    assert sampler.engine.load.running_sequences == 0


async def test_cancelling_a_batch_releases_everything(sampler):
    """Cancelling a batch after one result frees all of its sequences."""
    prompts = [sampling_pb2.Prompt(token_ids=ints([1, 3 + number % 300])) for number in range(PROMPTS)]
    params = sampling_pb2.SamplingParams(max_tokens=3, sample_count=8, top_logprob_count=20, is_eos_ignored=True)
    call = sampler.stub.SampleBatch(
        wire.SampleBatchRequest(base_model='tiny', prompts=prompts, params=params), metadata=ALICE
    )
    await anext(aiter(call))
    call.cancel()
    await sampler.wait_for_load(0)
    assert sampler.engine.buffered_events == 0


async def test_thousand_sequences_are_scored_in_their_order(sampler):
    """Scores are returned in the order of the request."""
    request = wire.ComputeLogprobsRequest(
        base_model='tiny', token_ids=[ints([1, 3 + number % 7, 9]) for number in range(PROMPTS)]
    )
    answer = await sampler.stub.ComputeLogprobs(request, metadata=ALICE)
    scores = [numbers(sequence.logprobs)[1:] for sequence in answer.sequences]
    assert len(scores) == PROMPTS
    assert all(scores[number] == scores[number % 7] for number in range(PROMPTS))
    assert len({tuple(score) for score in scores}) == 7
