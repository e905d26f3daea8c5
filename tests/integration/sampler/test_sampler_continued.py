"""Requests that another sampler continues: no token is lost or repeated, and only services may continue a request."""

from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import failure_of
from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import (
    FakeWeightSource,
    RunningSampler,
    ints,
    numbers,
    sample_request,
    serving_sampler,
    tenant,
)
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.sampler.engine import EngineConfig
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle_services.sampler.ports import SamplerEngine

CLIENT = tenant('alice')
INTERNAL = (*CLIENT, ('x-twinkle-internal', '1'))
EXACT = sampling_pb2.AdapterRef(adapter_id='ad-1', exact=1)


@pytest.fixture(params=['fake', 'torch'])
async def samplers(request: pytest.FixtureRequest, tiny_llama_dir: Path, tmp_path: Path) -> AsyncIterator[Any]:
    """Two samplers with engines of the same kind and one source of weights."""
    source = FakeWeightSource()
    source.publish('alice', lora_weights(1))
    limits = EngineConfig(max_sequences=4, max_batch_tokens=64, prefill_chunk_tokens=32)
    options = TorchEngineOptions(base_model='tiny', folder=str(tiny_llama_dir), limits=limits)
    async with AsyncExitStack() as stack:
        running: list[RunningSampler] = []
        for name in ('one', 'two'):
            engine: SamplerEngine = FakeSamplerEngine() if request.param == 'fake' else TorchEngine(options)
            stack.push_async_callback(engine.close)
            running.append(await stack.enter_async_context(serving_sampler(engine, source, tmp_path / name)))
        yield running


class Delivered:
    """The events of a stream that its reader has received."""

    def __init__(self, count: int) -> None:
        self.tokens: list[list[int]] = [[] for _ in range(count)]
        self.logprobs: list[list[float]] = [[] for _ in range(count)]
        self.texts = [''] * count
        self.ends: list[Any] = [None] * count
        self.prompts = 0

    def add(self, response: wire.SampleResponse) -> None:
        """Add an event; no event may follow the end of a sequence."""
        kind = response.WhichOneof('event')
        if kind == 'prompt':
            self.prompts += 1
            return
        event = getattr(response, kind)
        assert self.ends[event.sequence_index] is None
        self.texts[event.sequence_index] += event.text
        if kind == 'finished':
            spans = [(span.version, span.begin_token, span.end_token) for span in event.version_spans]
            self.ends[event.sequence_index] = (event.stop_reason, spans)
            return
        self.tokens[event.sequence_index] += numbers(event.token_ids)
        self.logprobs[event.sequence_index] += numbers(event.logprobs)

    def so_far(self) -> list[wire.SequenceSoFar]:
        """Return the continuation that another sampler needs."""
        return [
            wire.SequenceSoFar(sequence_index=index, token_ids=ints(tokens), is_finished=end is not None)
            for index, (tokens, end) in enumerate(zip(self.tokens, self.ends, strict=True))
        ]


@pytest.mark.parametrize('ref', [None, EXACT], ids=['base', 'adapter'])
async def test_stream_continues_on_another_sampler_with_the_same_result(samplers, ref):
    """If a stream is interrupted at different events, the second sampler completes it with the same result."""
    one, two = samplers
    params = {'max_tokens': 8, 'seed': 5, 'sample_count': 2, 'stop_strings': ['th'], 'presence_penalty': 0.5}
    responses = [response async for response in one.stub.Sample(sample_request(ref, params=params), metadata=CLIENT)]
    whole = Delivered(2)
    for response in responses:
        whole.add(response)
    for cut in range(0, len(responses), 3):
        parts = Delivered(2)
        for response in responses[:cut]:
            parts.add(response)
        request = sample_request(ref, params=params, continued=parts.so_far())
        parts.prompts = 0
        async for response in two.stub.Sample(request, metadata=INTERNAL):
            parts.add(response)
        assert parts.prompts == 0
        assert (parts.tokens, parts.logprobs, parts.texts) == (whole.tokens, whole.logprobs, whole.texts)
        assert parts.ends == whole.ends


async def test_only_services_can_continue_a_sequence(samplers):
    """A client may not continue a sequence."""
    request = sample_request(continued=[wire.SequenceSoFar(token_ids=ints([5]))])
    refused = await failure_of(samplers[0].stub.Sample(request, metadata=CLIENT))
    assert (refused.code, refused.reason) == ('PERMISSION_DENIED', 'SCOPE_MISSING')


async def test_continuation_needs_an_exact_version(samplers):
    """A continuation must name an exact version."""
    latest = sampling_pb2.AdapterRef(adapter_id='ad-1')
    request = sample_request(latest, continued=[wire.SequenceSoFar(token_ids=ints([5]))])
    refused = await failure_of(samplers[0].stub.Sample(request, metadata=INTERNAL))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'adapter.exact')


async def test_impossible_continuation_is_refused(samplers):
    """A continuation with more tokens than the request allows is refused."""
    request = sample_request(continued=[wire.SequenceSoFar(token_ids=ints([5] * 7))])
    refused = await failure_of(samplers[0].stub.Sample(request, metadata=INTERNAL))
    assert (refused.code, refused.field) == ('INVALID_ARGUMENT', 'continued')
