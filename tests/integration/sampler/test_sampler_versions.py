"""Samples with adapter versions from a real checkpoint service report the version of every token."""

import asyncio
import gc
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
import torch
from google.protobuf import duration_pb2
from opentelemetry import propagate, trace

from fixtures.checkpoint_service import ALICE as ALICE_SERVICE
from fixtures.checkpoint_service import Running, failure_of, serving
from fixtures.recorded_metrics import metric
from fixtures.sampled import LORA, lora_state, lora_tensors
from fixtures.sampler_service import (
    PROMPT,
    RunningSampler,
    ints,
    numbers,
    read_answer,
    sample_request,
    serving_sampler,
    tenant,
)
from twinkle.api.checkpoint.v1 import weights_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle.checkpoint_engine import PackedState
from twinkle.nn import AdapterSpan, LoraWeights, PackedCausalLM, SequenceSpan, tensor_of
from twinkle.sampler.engine import EngineConfig
from twinkle.telemetry import read_spans
from twinkle_client.tracing import tracing_to
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire.receiver import Receiver
from twinkle_services.sampler.backends.checkpoint_client import CheckpointClient
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle_services.sampler.domain.adapter import AdapterWeights

ALICE, BOB = tenant('alice'), tenant('bob')


def wait(seconds: float) -> duration_pb2.Duration:
    """Return the waiting time of a request for its version, from seconds."""
    return duration_pb2.Duration(nanos=int(seconds * 1e9) % 10**9, seconds=int(seconds))


def adapter(**fields: Any) -> sampling_pb2.AdapterRef:
    """Return a reference to the adapter of these tests."""
    return sampling_pb2.AdapterRef(**{'adapter_id': 'ad-1', **fields})


async def publish(checkpoint: Running, version: int, *, adapter_id: str = 'ad-1', **state: Any) -> None:
    """Publish weights that depend on the version."""
    with acting_for(ALICE_SERVICE):
        await checkpoint.weights.publish_version(adapter_id, lora_state(version, **state), version=version)


@pytest.fixture
async def engine(tiny_llama_dir: Path) -> AsyncIterator[TorchEngine]:
    """A small torch engine."""
    limits = EngineConfig(max_sequences=8, max_batch_tokens=64, prefill_chunk_tokens=32)
    created = TorchEngine(TorchEngineOptions(base_model='tiny', folder=str(tiny_llama_dir), limits=limits))
    yield created
    await created.close()


@pytest.fixture
async def checkpoint(tmp_path: Path) -> AsyncIterator[Running]:
    """A checkpoint service with space for every version of a test."""
    async with serving(tmp_path / 'checkpoint', ring_capacity=32) as running:
        yield running


@pytest.fixture
async def sampler(engine: TorchEngine, checkpoint: Running, tmp_path: Path) -> AsyncIterator[RunningSampler]:
    """A sampler with space for three versions."""
    async with serving_at(checkpoint.address, engine, tmp_path) as running:
        yield running


def serving_at(address: str, engine: TorchEngine, tmp_path: Path) -> Any:
    """Return a context in which a sampler serves weights from the checkpoint service at `address`."""

    async def open_sampler(stack: AsyncExitStack) -> RunningSampler:
        channel = open_channel(address)
        stack.push_async_callback(channel.close)
        source = CheckpointClient(channel)
        return await stack.enter_async_context(
            serving_sampler(engine, source, tmp_path / 'sampler', max_resident_versions=3)
        )

    return _ExitStackContext(open_sampler)


class _ExitStackContext:
    """An async context manager over the resources that a function pushes onto a stack."""

    def __init__(self, enter: Any) -> None:
        self._enter, self._stack = enter, AsyncExitStack()

    async def __aenter__(self) -> Any:
        return await self._enter(self._stack)

    async def __aexit__(self, *error: Any) -> None:
        await self._stack.aclose()


def expected_logprobs(model: PackedCausalLM, version: int, tokens: list[int]) -> list[float]:
    """Return the log-probability of each new token under the given version, from one forward pass."""
    weights = None
    if version:
        state = {name: tensor_of(data) for name, data in lora_tensors(version).items()}
        weights = LoraWeights.from_peft_state(model.layers, LORA, state)
    ids = torch.tensor(PROMPT + tokens)
    rows = len(ids)
    with torch.no_grad():
        hidden = model.hidden(
            ids, torch.arange(rows), sequences=[SequenceSpan(0, rows)], adapters=[AdapterSpan(0, rows, weights)]
        )
        return model.label_logprobs(hidden[len(PROMPT) - 1 : -1], ids[len(PROMPT) :]).tolist()


async def test_versions_and_tokens_are_measured(sampler, checkpoint):
    """The metrics count tokens and received bytes, and measure how long each version takes to become usable."""
    names = {
        'first tokens': 'twinkle_time_to_first_token_seconds_count',
        'prompt tokens': 'twinkle_prompt_tokens_total',
        'publications': 'twinkle_publish_to_live_seconds_count',
        'sampled tokens': 'twinkle_sampled_tokens_total',
        'token times': 'twinkle_time_per_output_token_seconds_count',
    }
    await publish(checkpoint, 1)
    before = {key: metric(name) for key, name in names.items()}
    received = sum(metric('twinkle_weights_received_bytes_total', encoding=kind) for kind in ('whole', 'delta'))
    for version in (1, 2):
        if version > 1:
            await publish(checkpoint, version)
        await read_answer(sampler.stub.Sample(sample_request(adapter(exact=version)), metadata=ALICE))
    growth = {key: metric(name) - before[key] for key, name in names.items()}
    prompts = {'prompt tokens': 2 * len(PROMPT), 'sampled tokens': 12}
    assert growth == {'first tokens': 2, 'publications': 1, 'token times': 2, **prompts}
    sizes = sum(metric('twinkle_weights_received_bytes_total', encoding=kind) for kind in ('whole', 'delta'))
    assert sizes > received


async def test_spans_of_a_request_have_content(sampler, checkpoint, tmp_path):
    """The trace of a request shows the transfer of its weights, the wait, and the tokens with their standard names."""
    await publish(checkpoint, 1)
    with tracing_to(tmp_path / 'spans'), trace.get_tracer('test').start_as_current_span('client'):
        headers: dict[str, str] = {}
        propagate.inject(headers)
        request = sample_request(adapter(exact=1))
        await read_answer(sampler.stub.Sample(request, metadata=(*ALICE, *headers.items())))
    spans = {span.name: span for span in read_spans(tmp_path / 'spans')}
    server, generate = spans['twinkle.api.sampler.v1.SamplerService/Sample'], spans['generate']
    assert (generate.parent_id, spans['queue'].parent_id) == (server.span_id, generate.span_id)
    assert spans['tokenize'].attributes == {'twinkle.token_count': str(len(PROMPT))}
    expected = {
        'gen_ai.operation.name': 'text_completion',
        'gen_ai.request.model': 'tiny',
        'gen_ai.request.max_tokens': '6',
        'gen_ai.usage.input_tokens': str(len(PROMPT)),
        'gen_ai.usage.output_tokens': '6',
        'gen_ai.response.finish_reasons': "('length',)",
        'twinkle.adapter_id': 'ad-1',
        'twinkle.version': '1',
    }
    assert expected.items() <= generate.attributes.items()
    assert float(generate.attributes['gen_ai.response.time_to_first_chunk']) > 0
    # A version that a stream announces is loaded in a separate trace.
    loaded = spans['load adapter']
    assert (loaded.parent_id, loaded.attributes['twinkle.version']) == (spans['new version'].span_id, '1')


async def test_published_version_is_sampled_and_named(sampler, checkpoint, tiny_llama_dir):
    """Log-probabilities are those of the published weights, spans name the version, and the base model is unchanged."""
    model = PackedCausalLM.load(tiny_llama_dir)
    await publish(checkpoint, 1)
    answer = await read_answer(sampler.stub.Sample(sample_request(adapter()), metadata=ALICE))
    assert answer.spans == [[(1, 0, 6)]]
    assert answer.logprobs[0] == pytest.approx(expected_logprobs(model, 1, answer.tokens[0]), abs=1e-4)
    base = await read_answer(sampler.stub.Sample(sample_request(), metadata=ALICE))
    assert base.spans == [[(0, 0, 6)]]
    assert base.logprobs[0] == pytest.approx(expected_logprobs(model, 0, base.tokens[0]), abs=1e-4)
    assert expected_logprobs(model, 1, base.tokens[0]) != pytest.approx(base.logprobs[0], abs=1e-2)


async def test_request_waits_for_its_version(sampler, checkpoint):
    """A request for a later version waits, a request for an older version is served, and a timeout is an error."""
    await publish(checkpoint, 1)
    waiting = asyncio.ensure_future(
        read_answer(sampler.stub.Sample(sample_request(adapter(at_least=2, wait_timeout=wait(20))), metadata=ALICE))
    )
    await read_answer(sampler.stub.Sample(sample_request(adapter()), metadata=ALICE))
    assert not waiting.done()
    await publish(checkpoint, 2)
    assert (await waiting).spans == [[(2, 0, 6)]]
    exact = await read_answer(sampler.stub.Sample(sample_request(adapter(exact=1)), metadata=ALICE))
    assert exact.spans == [[(1, 0, 6)]]
    refused = await failure_of(
        sampler.stub.Sample(sample_request(adapter(exact=3, wait_timeout=wait(0.05))), metadata=ALICE)
    )
    assert (refused.code, refused.reason) == ('UNAVAILABLE', 'VERSION_NOT_READY')
    assert refused.metadata == {'adapterId': 'ad-1', 'version': '3'}


async def test_foreign_adapter_is_reported_like_a_missing_one(sampler, checkpoint):
    """A resident adapter is not listed for another tenant, whose sampling fails as with a missing adapter."""
    await publish(checkpoint, 1)
    await sampler.stub.LoadAdapter(wire.LoadAdapterRequest(adapter=adapter()), metadata=ALICE)
    foreign = await failure_of(sampler.stub.Sample(sample_request(adapter()), metadata=BOB))
    missing = await failure_of(sampler.stub.Sample(sample_request(adapter(adapter_id='ad-9')), metadata=BOB))
    assert (foreign.code, foreign.reason) == (missing.code, missing.reason)
    assert foreign.message.replace('ad-1', 'ad-9') == missing.message
    assert foreign.reason == 'ADAPTER_NOT_FOUND'
    listed = await sampler.stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(), metadata=BOB)
    assert not listed.adapters


async def test_evicted_version_is_loaded_again(sampler, checkpoint):
    """Each of four adapters on three slots is sampled with its weights, even after an eviction."""
    answers: dict[str, list[int]] = {}
    for number in (1, 2, 3, 4):
        await publish(checkpoint, number, adapter_id=f'ad-{number}')
    for name in ('ad-1', 'ad-2', 'ad-3', 'ad-4', 'ad-1', 'ad-2'):
        request = sample_request(adapter(adapter_id=name), params={'temperature': 0.0})
        answer = await read_answer(sampler.stub.Sample(request, metadata=ALICE))
        assert answers.setdefault(name, answer.tokens[0]) == answer.tokens[0]
        assert answer.spans == [[(int(name[-1]), 0, 6)]]
        listed = await sampler.stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(), metadata=ALICE)
        assert len(listed.adapters) <= 3
    assert len({tuple(tokens) for tokens in answers.values()}) == 4


async def test_resident_adapters_are_listed_in_pages_and_unloaded(sampler, checkpoint):
    """Resident adapters are listed in pages by adapter and version, and can be unloaded."""
    for number in (1, 2):
        await publish(checkpoint, number, adapter_id=f'ad-{number}')
        loaded = await sampler.stub.LoadAdapter(
            wire.LoadAdapterRequest(adapter=adapter(adapter_id=f'ad-{number}')), metadata=ALICE
        )
        assert (loaded.adapter.adapter_id, loaded.adapter.version) == (f'ad-{number}', number)
        assert loaded.adapter.size_bytes == lora_state(number).manifest.size_bytes
    first = await sampler.stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(page_size=1), metadata=ALICE)
    second = await sampler.stub.ListResidentAdapters(
        wire.ListResidentAdaptersRequest(page_size=1, page_token=first.next_page_token), metadata=ALICE
    )
    assert [page.adapters[0].adapter_id for page in (first, second)] == ['ad-1', 'ad-2']
    assert not second.next_page_token
    await sampler.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id='ad-1'), metadata=ALICE)
    remaining = await sampler.stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(), metadata=ALICE)
    assert [item.adapter_id for item in remaining.adapters] == ['ad-2']
    missing = await failure_of(sampler.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id='ad-1'), metadata=ALICE))
    assert missing.reason == 'ADAPTER_NOT_FOUND'


async def test_durable_checkpoint_is_sampled_by_its_path(sampler, checkpoint):
    """A checkpoint gives the tokens of its weights; after its replacement, it gives those of the new weights."""
    await publish(checkpoint, 1)
    greedy = {'temperature': 0.0}
    expected = await read_answer(sampler.stub.Sample(sample_request(adapter(), params=greedy), metadata=ALICE))
    path = 'twinkle://ad-1/weights/final'
    request = sample_request(sampling_pb2.AdapterRef(checkpoint_path=path), params=greedy)
    tokens = []
    for seed, step in ((1, 7), (2, 7)):
        target = weights_pb2.CheckpointTarget(name='final', is_overwrite_allowed=True, step_count=step)
        with acting_for(ALICE_SERVICE):
            await checkpoint.weights.save_checkpoint('ad-1', lora_state(seed), target)
        answer = await read_answer(sampler.stub.Sample(request, metadata=ALICE))
        assert answer.spans == [[(7, 0, 6)]]
        tokens.append(answer.tokens[0])
    assert tokens[0] == expected.tokens[0] != tokens[1]
    assert (await failure_of(sampler.stub.Sample(request, metadata=BOB))).reason == 'CHECKPOINT_NOT_FOUND'


async def test_adapter_of_another_model_is_refused(sampler, checkpoint):
    """An adapter of another base model is refused."""
    await publish(checkpoint, 1, base_model='other')
    failure = await failure_of(sampler.stub.Sample(sample_request(adapter()), metadata=ALICE))
    assert (failure.code, failure.field) == ('INVALID_ARGUMENT', 'adapter')


async def test_scores_name_their_version(sampler, checkpoint, tiny_llama_dir):
    """ComputeLogprobs uses the requested version, and names the version in the response."""
    model = PackedCausalLM.load(tiny_llama_dir)
    await publish(checkpoint, 1)
    request = wire.ComputeLogprobsRequest(
        base_model='tiny', adapter=adapter(exact=1), token_ids=[ints([*PROMPT, 9, 10])]
    )
    (scored,) = (await sampler.stub.ComputeLogprobs(request, metadata=ALICE)).sequences
    assert scored.version == 1
    assert numbers(scored.logprobs)[len(PROMPT) :] == pytest.approx(expected_logprobs(model, 1, [9, 10]), abs=1e-4)


async def test_publishing_does_not_affect_running_streams(sampler, checkpoint, tiny_llama_dir):
    """Streams that run while versions are published are not aborted, and each has tokens of one version."""
    model = PackedCausalLM.load(tiny_llama_dir)
    await publish(checkpoint, 1)

    async def sample_on(seed: int) -> list[Any]:
        request = sample_request(adapter(), params={'max_tokens': 24, 'seed': seed})
        return [await read_answer(sampler.stub.Sample(request, metadata=ALICE)) for _ in range(4)]

    streams = [asyncio.ensure_future(sample_on(seed)) for seed in range(6)]
    for version in range(2, 12):
        await publish(checkpoint, version)
    seen = set()
    for answer in [answer for stream in streams for answer in await stream]:
        ((version, begin, end),) = answer.spans[0]
        assert (begin, end) == (0, 24)
        assert answer.reasons == [sampling_pb2.STOP_REASON_LENGTH]
        assert answer.logprobs[0] == pytest.approx(expected_logprobs(model, version, answer.tokens[0]), abs=1e-4)
        seen.add(version)
    assert len(seen) > 1


async def test_checkpoint_service_may_restart(engine, tmp_path):
    """Resident versions are served while the checkpoint service is down; new versions arrive after its restart."""
    with socket.socket() as free:
        free.bind(('127.0.0.1', 0))
        listen = f'127.0.0.1:{free.getsockname()[1]}'
    state_dir = tmp_path / 'checkpoint'
    async with serving_at(listen, engine, tmp_path) as sampler:
        async with serving(state_dir, listen=listen) as checkpoint:
            await publish(checkpoint, 1)
            await read_answer(sampler.stub.Sample(sample_request(adapter()), metadata=ALICE))
        answer = await read_answer(sampler.stub.Sample(sample_request(adapter()), metadata=ALICE))
        assert answer.spans == [[(1, 0, 6)]]
        refused = await failure_of(
            sampler.stub.Sample(sample_request(adapter(at_least=2, wait_timeout=wait(0.05))), metadata=ALICE)
        )
        assert refused.reason == 'VERSION_NOT_READY'
        async with serving(state_dir, listen=listen) as checkpoint:
            await publish(checkpoint, 2)
            request = sample_request(adapter(at_least=2, wait_timeout=wait(30)))
            assert (await read_answer(sampler.stub.Sample(request, metadata=ALICE))).spans == [[(2, 0, 6)]]


async def test_weights_are_freed_without_a_garbage_collection(checkpoint: Running, sampler: RunningSampler) -> None:
    """Weights of replaced versions, unloaded adapters and cancelled requests do not remain in reference cycles."""
    gc.collect()
    gc.disable()
    try:
        for version in range(1, 6):
            await publish(checkpoint, version)
            await read_answer(sampler.stub.Sample(sample_request(adapter(at_least=version)), metadata=ALICE))
        for adapter_id in ('ad-2', 'ad-3', 'ad-4', 'ad-5'):
            await publish(checkpoint, 1, adapter_id=adapter_id)
            call = sampler.stub.Sample(sample_request(adapter(adapter_id=adapter_id)), metadata=ALICE)
            await call.read()
            call.cancel()
            await unload(sampler, adapter_id)
        missing = sampler.stub.Sample(sample_request(adapter(adapter_id='ad-6')), metadata=ALICE)
        assert (await failure_of(read_answer(missing))).reason == 'ADAPTER_NOT_FOUND'
        gc.set_debug(gc.DEBUG_SAVEALL)
        gc.collect()
        kinds = {type(item) for item in gc.garbage}
        assert not kinds & {AdapterWeights, PackedState, Receiver, memoryview}
    finally:
        gc.set_debug(0)
        gc.garbage.clear()
        gc.enable()


async def unload(sampler: RunningSampler, adapter_id: str) -> None:
    """Unload all idle versions of an adapter."""
    await sampler.stub.UnloadAdapter(wire.UnloadAdapterRequest(adapter_id=adapter_id), metadata=ALICE)
