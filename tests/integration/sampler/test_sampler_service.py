"""The sampler service over loopback: streams, batches, scores, aborts, pauses and refusals."""

import asyncio
import logging
import math
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest
import structlog

from fixtures.checkpoint_service import failure_of
from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampler_service import (
    PROMPT,
    FakeWeightSource,
    RunningSampler,
    ints,
    numbers,
    read_answer,
    sample_request,
    serving_sampler,
    tenant,
)
from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import engine_pb2, sampling_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.server.v1 import server_service_pb2
from twinkle.sampler.engine import EngineConfig
from twinkle_services.sampler.backends.torch_engine import TorchEngine, TorchEngineOptions
from twinkle_services.sampler.ports import SamplerEngine

ALICE, BOB = tenant('alice'), tenant('bob')
OPERATOR = tenant('alice', scopes='sample,operator')
LONG = {'max_tokens': 480}


@pytest.fixture(params=['fake', 'torch'])
async def engine(request: pytest.FixtureRequest, tiny_llama_dir: Path) -> AsyncIterator[SamplerEngine]:
    """The fake engine and the torch engine; each test runs with both."""
    created: SamplerEngine
    if request.param == 'fake':
        created = FakeSamplerEngine(max_sequences=2)
    else:
        limits = EngineConfig(max_sequences=2, max_batch_tokens=64, prefill_chunk_tokens=32)
        created = TorchEngine(TorchEngineOptions(base_model='tiny', folder=str(tiny_llama_dir), limits=limits))
    yield created
    await created.close()


@pytest.fixture
async def sampler(engine: SamplerEngine, tmp_path: Path) -> AsyncIterator[RunningSampler]:
    """A sampler service with `engine` and without adapters."""
    async with serving_sampler(engine, FakeWeightSource(), tmp_path, queue_length=3) as running:
        yield running


async def test_stream_has_prompt_tokens_and_final_events(sampler):
    """A stream has the prompt, then tokens, and one final event per sequence with version spans."""
    params = {'seed': 1, 'sample_count': 2, 'top_logprob_count': 2}
    answer = await read_answer(sampler.stub.Sample(sample_request(params=params), metadata=ALICE), 2)
    assert numbers(answer.prompt.token_ids) == PROMPT
    assert [len(tokens) for tokens in answer.tokens] == [6, 6]
    assert answer.reasons == [sampling_pb2.STOP_REASON_LENGTH] * 2
    assert answer.spans == [[(0, 0, 6)]] * 2
    assert all(value <= 0 for logprobs in answer.logprobs for value in logprobs)


async def test_text_and_chat_are_prompts(sampler):
    """Text and chat prompts are encoded, and the response contains their tokens."""
    turn = message_pb2.Message(role=message_pb2.ROLE_USER, parts=[message_pb2.ContentPart(text='hi')])
    chat = sampling_pb2.ChatPrompt(trajectory=message_pb2.Trajectory(messages=[turn]))
    for prompt in (sampling_pb2.Prompt(text='hello'), sampling_pb2.Prompt(chat=chat)):
        answer = await read_answer(sampler.stub.Sample(sample_request(prompt=prompt), metadata=ALICE))
        assert len(numbers(answer.prompt.token_ids)) >= 4
        assert len(answer.tokens[0]) == 6


async def test_cancelled_call_leaves_the_engine(sampler):
    """A cancelled call's sequences leave the engine."""
    call = sampler.stub.Sample(sample_request(params={**LONG, 'sample_count': 2}), metadata=ALICE)
    await anext(aiter(call))
    await anext(aiter(call))
    call.cancel()
    await sampler.wait_for_load(0)


async def test_expired_call_leaves_the_engine(sampler):
    """A call whose deadline passes fails with DEADLINE_EXCEEDED, and its sequences leave the engine."""
    reading = asyncio.ensure_future(
        read_answer(sampler.stub.Sample(sample_request(params=LONG), metadata=ALICE, timeout=0.5))
    )
    while not sampler.engine.load.running_sequences:
        await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)
    await sampler.engine.pause()
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await reading
    assert caught.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    await sampler.engine.resume()
    await sampler.wait_for_load(0)


async def test_aborted_stream_ends_with_its_stop_reason(sampler):
    """An aborted stream ends with the stop reason ABORT. Only its tenant can abort it, and only while it runs."""
    request = sample_request(request_id='mine', params=LONG)
    call = sampler.stub.Sample(request, metadata=ALICE)
    await anext(aiter(call))
    assert (await failure_of(sampler.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=BOB))).reason == (
        'REQUEST_NOT_FOUND'
    )
    assert (await failure_of(sampler.stub.Sample(request, metadata=ALICE))).reason == 'ID_TAKEN'
    await sampler.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=ALICE)
    responses = [response async for response in call]
    assert responses[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
    await sampler.wait_for_load(0)
    assert (await failure_of(sampler.stub.Abort(wire.AbortRequest(request_id='mine'), metadata=ALICE))).reason == (
        'REQUEST_NOT_FOUND'
    )


async def test_batch_finishes_every_prompt_once(sampler):
    """Each prompt of a batch is returned once, with the same sequences as Sample."""
    prompts = [[1, 40 + index, 41] for index in range(11)]
    params = sampling_pb2.SamplingParams(max_tokens=4, seed=2, sample_count=2, is_eos_ignored=True)
    request = wire.SampleBatchRequest(
        base_model='tiny', prompts=[sampling_pb2.Prompt(token_ids=ints(prompt)) for prompt in prompts], params=params
    )
    answers = [answer async for answer in sampler.stub.SampleBatch(request, metadata=ALICE)]
    assert sorted(answer.prompt_index for answer in answers) == list(range(11))
    for answer in answers:
        single = sample_request(prompt=request.prompts[answer.prompt_index])
        single.params.CopyFrom(params)
        expected = await read_answer(sampler.stub.Sample(single, metadata=ALICE), 2)
        assert numbers(answer.prompt.token_ids) == prompts[answer.prompt_index]
        assert [numbers(sequence.token_ids) for sequence in answer.sequences] == expected.tokens
        assert [sequence.text for sequence in answer.sequences] == expected.texts
        assert len({sequence.sequence_id for sequence in answer.sequences}) == 2


async def test_cancelled_batch_leaves_the_engine(sampler):
    """All prompts of a cancelled batch leave the engine."""
    request = wire.SampleBatchRequest(
        base_model='tiny',
        prompts=[sampling_pb2.Prompt(token_ids=ints(PROMPT))] * 3,
        params=sampling_pb2.SamplingParams(max_tokens=480, is_eos_ignored=True),
    )
    call = sampler.stub.SampleBatch(request, metadata=ALICE)
    reading = asyncio.ensure_future(call.read())
    while not sampler.engine.load.running_sequences:
        await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)
    call.cancel()
    await asyncio.wait([reading])
    await sampler.wait_for_load(0)


async def test_batch_whose_reader_leaves_logs_no_error(sampler, caplog):
    """A batch that is cancelled between two finished prompts ends as CANCELLED, without an error in the log."""
    request = wire.SampleBatchRequest(
        base_model='tiny',
        prompts=[sampling_pb2.Prompt(token_ids=ints(PROMPT))] * 200,
        params=sampling_pb2.SamplingParams(max_tokens=1),
    )
    with structlog.testing.capture_logs() as entries:
        call = sampler.stub.SampleBatch(request, metadata=ALICE)
        await call.read()
        call.cancel()
        await sampler.wait_for_load(0)
        while not (calls := [entry for entry in entries if entry.get('method', '').endswith('/SampleBatch')]):
            await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)
    assert [entry['status'] for entry in calls] == ['CANCELLED']
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []


async def test_scores_are_those_of_the_prompt(sampler):
    """ComputeLogprobs returns the prompt log-probabilities of Sample, in the order of the request."""
    sequences = [PROMPT, [5, 6], [7]]
    request = wire.ComputeLogprobsRequest(
        base_model='tiny', token_ids=[ints(tokens) for tokens in sequences], top_logprob_count=2
    )
    answer = await sampler.stub.ComputeLogprobs(request, metadata=ALICE)
    params = {'is_prompt_logprobs_returned': True, 'prompt_top_logprob_count': 2, 'max_tokens': 0}
    for scored, tokens in zip(answer.sequences, sequences, strict=True):
        prompt = sampling_pb2.Prompt(token_ids=ints(tokens))
        expected = await read_answer(sampler.stub.Sample(sample_request(prompt=prompt, params=params), metadata=ALICE))
        assert math.isnan(numbers(scored.logprobs)[0])
        assert numbers(scored.logprobs)[1:] == numbers(expected.prompt.logprobs)[1:]
        assert scored.top_logprobs == expected.prompt.top_logprobs
        assert scored.version == 0


async def test_pause_refuses_new_calls_and_keeps_running_ones(sampler):
    """A paused engine refuses new calls with a retryable error; running streams continue after the pause."""
    call = sampler.stub.Sample(sample_request(params={'max_tokens': 200, 'seed': 4}), metadata=ALICE)
    await anext(aiter(call))
    denied = await failure_of(sampler.stub.Pause(wire.PauseRequest(), metadata=ALICE))
    assert (denied.code, denied.reason) == ('PERMISSION_DENIED', 'SCOPE_MISSING')
    await sampler.stub.Pause(wire.PauseRequest(), metadata=OPERATOR)
    refused = await failure_of(sampler.stub.Sample(sample_request(), metadata=ALICE))
    assert (refused.code, refused.reason) == ('UNAVAILABLE', 'ENGINE_PAUSED')
    assert (await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)).load.is_paused
    await sampler.stub.Resume(wire.ResumeRequest(), metadata=OPERATOR)
    responses = [response async for response in call]
    assert sum(len(numbers(r.delta.token_ids)) for r in responses if r.HasField('delta')) == 200


async def test_pause_can_abort_running_streams(sampler):
    """A pause with ABORT ends running streams before the engine is paused."""
    call = sampler.stub.Sample(sample_request(params=LONG), metadata=ALICE)
    await anext(aiter(call))
    pause = sampler.stub.Pause(wire.PauseRequest(mode=engine_pb2.PAUSE_MODE_ABORT), metadata=OPERATOR)
    responses = [response async for response in call]
    await pause
    assert responses[-1].finished.stop_reason == sampling_pb2.STOP_REASON_ABORT
    assert sampler.engine.load.is_paused
    await sampler.stub.Resume(wire.ResumeRequest(), metadata=OPERATOR)
    assert len((await read_answer(sampler.stub.Sample(sample_request(), metadata=ALICE))).tokens[0]) == 6


async def test_full_queue_of_a_tenant_refuses_only_this_tenant(sampler):
    """A tenant's full queue refuses its next request, while another tenant's request waits."""
    await sampler.engine.pause()
    request = sample_request(params={'max_tokens': 2})
    # Four requests are admitted, twice as many as the engine runs at once; three fill the tenant's queue.
    calls = [sampler.stub.Sample(request, metadata=ALICE) for _ in range(7)]
    reading = [asyncio.ensure_future(read_answer(call)) for call in calls]
    is_queue_full = False
    while not is_queue_full:
        load = (await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)).load
        is_queue_full = load.running_sequence_count + load.waiting_sequence_count == 7
    refused = await failure_of(sampler.stub.Sample(request, metadata=ALICE))
    assert (refused.code, refused.reason) == ('RESOURCE_EXHAUSTED', 'QUEUE_FULL')
    reading.append(asyncio.ensure_future(read_answer(sampler.stub.Sample(request, metadata=BOB))))
    await sampler.engine.resume()
    answers = await asyncio.gather(*reading)
    assert [len(answer.tokens[0]) for answer in answers] == [2] * 8


@pytest.mark.parametrize(
    ('fields', 'code', 'reason', 'field'),
    [
        ({'base_model': ''}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'base_model'),
        ({'base_model': 'other'}, 'NOT_FOUND', 'BASE_MODEL_NOT_FOUND', ''),
        ({'prompt': None}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt'),
        ({'prompt': {'token_ids': ints([])}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.token_ids'),
        ({'prompt': {'token_ids': ints([1, 320])}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.token_ids'),
        ({'prompt': {'token_ids': ints([-1])}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.token_ids'),
        ({'prompt': {'token_ids': {'dtype': 7}}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.token_ids'),
        ({'prompt': {'text': ''}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.text'),
        ({'prompt': {'chat': {}}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'prompt.chat.trajectory.messages'),
        ({'prompt': {'token_ids': ints([1] * 507)}}, 'INVALID_ARGUMENT', 'CONTEXT_EXCEEDED', ''),
        ({'params': {'temperature': -1.0}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.temperature'),
        ({'params': {'temperature': math.nan}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.temperature'),
        ({'params': {'top_p': 0.0}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.top_p'),
        ({'params': {'top_k': 0}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.top_k'),
        ({'params': {'max_tokens': -1}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.max_tokens'),
        ({'params': {'min_tokens': 7}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.min_tokens'),
        ({'params': {'sample_count': 129}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.sample_count'),
        ({'params': {'top_logprob_count': 21}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.top_logprob_count'),
        ({'params': {'stop_strings': ['']}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.stop_strings[0]'),
        ({'params': {'stop_token_ids': [-2]}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'params.stop_token_ids[0]'),
        ({'adapter': {}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'adapter.adapter_id'),
        ({'adapter': {'adapter_id': 'a', 'exact': 0}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'adapter.exact'),
        ({'adapter': {'adapter_id': 'a', 'at_least': -3}}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'adapter.at_least'),
        ({'adapter': {'adapter_id': 'a'}}, 'NOT_FOUND', 'ADAPTER_NOT_FOUND', ''),
        ({'adapter': {'checkpoint_path': 'twinkle://r/weights/c'}}, 'NOT_FOUND', 'CHECKPOINT_NOT_FOUND', ''),
        ({'request_id': 'x' * 257}, 'INVALID_ARGUMENT', 'INVALID_FIELD', 'request_id'),
    ],
)
async def test_invalid_sample_request_is_refused_with_its_field(sampler, fields, code, reason, field):
    """An invalid request is refused with its code, reason and field, and leaves nothing running."""
    failure = await failure_of(sampler.stub.Sample(sample_request(**fields), metadata=ALICE))
    assert (failure.code, failure.reason, failure.field) == (code, reason, field)
    load = (await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)).load
    assert load.running_sequence_count == load.waiting_sequence_count == 0


async def test_invalid_requests_of_other_methods_are_refused_with_their_field(sampler):
    """The error for an invalid request to any other method names the field."""
    stub = sampler.stub
    good, bad = sampling_pb2.Prompt(token_ids=ints(PROMPT)), sampling_pb2.Prompt(token_ids=ints([999]))
    scores = wire.ComputeLogprobsRequest(base_model='tiny', token_ids=[ints(PROMPT), ints([999])])
    calls = {
        'prompts': stub.SampleBatch(wire.SampleBatchRequest(base_model='tiny'), metadata=ALICE),
        'prompts[1].token_ids': stub.SampleBatch(
            wire.SampleBatchRequest(base_model='tiny', prompts=[good, bad]), metadata=ALICE
        ),
        'token_ids': stub.ComputeLogprobs(wire.ComputeLogprobsRequest(base_model='tiny'), metadata=ALICE),
        'token_ids[1]': stub.ComputeLogprobs(scores, metadata=ALICE),
        'request_id': stub.Abort(wire.AbortRequest(), metadata=ALICE),
        'adapter': stub.LoadAdapter(wire.LoadAdapterRequest(), metadata=ALICE),
        'adapter_id': stub.UnloadAdapter(wire.UnloadAdapterRequest(), metadata=ALICE),
        'page_size': stub.ListResidentAdapters(wire.ListResidentAdaptersRequest(page_size=-1), metadata=ALICE),
        'interval': stub.WatchLoad(wire.WatchLoadRequest(interval={'nanos': 1}), metadata=ALICE),
        'mode': stub.Pause(wire.PauseRequest(mode=9), metadata=OPERATOR),
    }
    for field, call in calls.items():
        failure = await failure_of(call)
        assert (failure.code, failure.reason, failure.field) == ('INVALID_ARGUMENT', 'INVALID_FIELD', field)


async def test_sampling_needs_its_scope(sampler):
    """A key without the required scope may not sample, load an adapter or reset the prefix cache."""
    trainer = tenant('alice', scopes='train')
    for call in (
        sampler.stub.Sample(sample_request(), metadata=trainer),
        sampler.stub.LoadAdapter(wire.LoadAdapterRequest(adapter={'adapter_id': 'a'}), metadata=trainer),
        sampler.stub.ResetPrefixCache(wire.ResetPrefixCacheRequest(), metadata=ALICE),
    ):
        assert (await failure_of(call)).reason == 'SCOPE_MISSING'


async def test_prefix_cache_is_reset_by_operators(sampler):
    """An operator can reset the prefix cache, and receives the number of dropped tokens."""
    answer = await sampler.stub.ResetPrefixCache(wire.ResetPrefixCacheRequest(), metadata=OPERATOR)
    assert answer.dropped_token_count == 0


async def test_server_info_lists_the_model_and_every_method(sampler):
    """GetServerInfo reports the model and lists every method as supported."""
    info = await sampler.server_info.GetServerInfo(server_service_pb2.GetServerInfoRequest(), metadata=ALICE)
    (service,) = info.services
    assert service.base_models[0].base_model == 'tiny'
    assert service.base_models[0].is_sampleable
    methods = [method for method in service.methods if 'SamplerService' in method.method]
    assert len(methods) == 15
    assert all(method.is_supported for method in methods)


async def test_structured_output_is_refused_if_unsupported(sampler):
    """An engine without structured output refuses a request for structured output."""
    form = sampling_pb2.StructuredOutput(choices=sampling_pb2.TextChoices(texts=['a', 'b']))
    refused = await failure_of(sampler.stub.Sample(sample_request(params={'structured_output': form}), metadata=ALICE))
    assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'NOT_SUPPORTED_HERE')
    assert refused.metadata == {'what': 'structured_output', 'engine': 'torch'}


async def test_sleep_waits_for_running_requests_and_refuses_new_ones(sampler):
    """An engine with sleep mode finishes running requests before it sleeps; other engines refuse to sleep."""
    if not sampler.engine.facts.can_sleep:
        refused = await failure_of(sampler.stub.Sleep(wire.SleepRequest(), metadata=OPERATOR))
        assert (refused.code, refused.reason) == ('FAILED_PRECONDITION', 'NOT_SUPPORTED_HERE')
    else:
        call = sampler.stub.Sample(sample_request(params={'max_tokens': 30}), metadata=ALICE)
        await anext(aiter(call))
        await sampler.stub.Sleep(wire.SleepRequest(), metadata=OPERATOR)
        assert len([response async for response in call]) == 31
        load = (await sampler.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)).load
        assert (load.is_sleeping, load.max_sequence_count) == (True, 2)
        refused = await failure_of(sampler.stub.Sample(sample_request(), metadata=ALICE))
        assert refused.reason == 'ENGINE_PAUSED'
        await sampler.stub.WakeUp(wire.WakeUpRequest(), metadata=OPERATOR)
    assert (await read_answer(sampler.stub.Sample(sample_request(), metadata=ALICE))).tokens


async def test_sleep_is_for_operators(sampler):
    """A key without the scope `operator` cannot put the engine to sleep or wake it up."""
    for call in (
        sampler.stub.Sleep(wire.SleepRequest(), metadata=ALICE),
        sampler.stub.WakeUp(wire.WakeUpRequest(), metadata=ALICE),
    ):
        assert (await failure_of(call)).reason == 'SCOPE_MISSING'
