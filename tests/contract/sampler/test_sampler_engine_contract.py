"""Contract tests of all sampler engines: order of events, final events, seeds, versions and pauses."""

import asyncio
from contextlib import aclosing

import numpy as np
import pytest

from fixtures.engine_requests import PROMPT, make_request, run, sampled_logprobs, settle
from fixtures.sampled import ONE, TWO, Sampled, lora_weights
from twinkle.data_format import StopReason, TensorData
from twinkle_services.kit.errors import InvalidField
from twinkle_services.sampler.domain.adapter import VersionKey
from twinkle_services.sampler.domain.errors import AdapterMisfit, ContextExceeded
from twinkle_services.sampler.domain.generation import (
    ChatPrompt,
    PromptComputed,
    TextPrompt,
    TokenPrompt,
    TokensSampled,
)

pytestmark = pytest.mark.asyncio(loop_scope='session')


async def test_prompt_event_is_first_and_each_sequence_has_one_final_event(engine):
    """The prompt event is first; each sequence has the requested tokens and exactly one final event."""
    sampled = await run(engine, make_request(max_tokens=5, num_samples=3, logprobs=2))
    assert sampled.prompt == PromptComputed(token_ids=PROMPT)
    assert [len(tokens) for tokens in sampled.tokens] == [5, 5, 5]
    assert sampled.reasons == [StopReason.LENGTH] * 3
    for tokens, logprobs in zip(sampled.tokens, sampled.logprobs, strict=True):
        assert [entry[0][0] for entry in logprobs] == tokens
        assert {len(entry) for entry in logprobs} == {3}
        assert all(value <= 0 for entry in logprobs for _, value in entry)


async def test_seed_repeats_samples(engine):
    """The same seed gives the same tokens, and the samples of one request differ."""
    first, again = [await run(engine, make_request(max_tokens=8, num_samples=2)) for _ in range(2)]
    assert first.tokens == again.tokens
    assert first.tokens[0] != first.tokens[1]


async def test_versions_in_one_batch_do_not_affect_each_other(engine):
    """Requests for the base model and for two versions give the same results in one batch as separately.

    Each result names its version.
    """
    requests = [make_request(str(key), key, max_tokens=8, temperature=0) for key in (None, ONE, TWO)]
    separate = [await run(engine, request) for request in requests]
    batched = await asyncio.gather(*(run(engine, request) for request in requests))
    for one, other in zip(separate, batched, strict=True):
        assert one.tokens == other.tokens
        # The torch engine gives bitwise equal results; vLLM's rounding depends on the batch size.
        tolerance = 1e-5 if engine.facts.engine == 'vllm' else 0.0
        np.testing.assert_allclose(sampled_logprobs(one), sampled_logprobs(other), rtol=0, atol=tolerance)
    assert len({tuple(sampled.tokens[0]) for sampled in separate}) == 3
    for sampled, version in zip(batched, (0, 1, 2), strict=True):
        assert sampled.versions == {version}
        (span,) = sampled.spans[0]
        assert (span.version, span.begin_token, span.end_token) == (version, 0, 8)


async def test_zero_max_tokens_scores_the_prompt(engine):
    """A request with max_tokens 0 gives log-probabilities of the prompt and no tokens."""
    sampled = await run(engine, make_request(max_tokens=0, prompt_logprobs=2))
    assert sampled.tokens == [[]]
    assert sampled.reasons == [StopReason.LENGTH]
    assert sampled.prompt.logprobs[0] is sampled.prompt.top_logprobs[0] is None
    assert len(sampled.prompt.logprobs) == len(sampled.prompt.top_logprobs) == len(PROMPT)
    assert all(len(best) == 2 for best in sampled.prompt.top_logprobs[1:])


async def test_stop_token_ends_a_sequence(engine):
    """The stop token is the last token, and the stop reason is STOP."""
    plain = await run(engine, make_request(max_tokens=8, temperature=0))
    stop = plain.tokens[0][3]
    stopped = await run(engine, make_request(max_tokens=8, temperature=0, stop=[stop]))
    assert stopped.tokens[0] == plain.tokens[0][: plain.tokens[0].index(stop) + 1]
    assert stopped.reasons == [StopReason.STOP]


async def test_context_overflow_is_refused_without_events(engine):
    """A request that exceeds the context is refused without events, and the engine is idle afterwards."""
    with pytest.raises(ContextExceeded):
        await run(engine, make_request(max_tokens=509))
    await settle(engine)
    assert engine.load.running_sequences == engine.load.waiting_sequences == 0


async def test_abort_ends_every_sequence_and_the_stream(engine):
    """The stream of an aborted request ends normally, with a final event for each unfinished sequence."""
    sampled, is_aborted = Sampled(2), False
    async with aclosing(engine.generate(make_request(num_samples=2))) as events:
        async for event in events:
            sampled.take(event)
            if all(sampled.tokens) and not is_aborted:
                is_aborted = True
                await engine.abort('it')
    assert sampled.reasons == [StopReason.ABORT] * 2
    for tokens, spans in zip(sampled.tokens, sampled.spans, strict=True):
        assert [span.end_token for span in spans] == [len(tokens)]
    await settle(engine)
    assert engine.load.running_sequences == 0


async def test_closing_the_stream_stops_the_request(engine):
    """Closing the stream of a request stops the request."""
    async with aclosing(engine.generate(make_request(num_samples=2))) as events:
        assert isinstance(await anext(events), PromptComputed)
        assert isinstance(await anext(events), TokensSampled)
        await settle(engine)
        assert engine.load.running_sequences == 2
    await settle(engine)
    assert engine.load.running_sequences == 0


async def test_a_slow_reader_delays_only_itself(engine):
    """A request finishes while another stream is not read; that stream is complete when it is read later."""
    expected = await run(engine, make_request('quick', max_tokens=40))
    slow = Sampled(1)
    async with aclosing(engine.generate(make_request('slow', max_tokens=40))) as events:
        slow.take(await anext(events))
        quick = await run(engine, make_request('quick', max_tokens=40))
        await settle(engine)
        assert engine.load.running_sequences == 1
        async for event in events:
            slow.take(event)
    assert slow.tokens == quick.tokens == expected.tokens


async def test_a_paused_engine_resumes_without_loss(engine):
    """Requests wait during a pause and give complete results afterwards."""
    expected = await run(engine, make_request(max_tokens=6))
    await engine.pause()
    task = asyncio.create_task(run(engine, make_request(max_tokens=6)))
    await settle(engine)
    assert engine.load.is_paused
    assert not task.done()
    await engine.resume()
    assert (await task).tokens == expected.tokens
    await settle(engine)
    assert not engine.load.is_paused


async def test_weights_that_do_not_fit_are_refused(engine):
    """Weights that do not fit the model raise AdapterMisfit."""
    unknown = {'unknown': TensorData.from_numpy(np.zeros((2, 2), dtype=np.float32))}
    with pytest.raises(AdapterMisfit):
        await engine.load_adapter(VersionKey(ONE.adapter, 3), lora_weights(3, tensors=unknown))


async def test_unloading_is_idempotent(engine):
    """A second unload of a version has no effect and raises no error."""
    await engine.unload_adapter(ONE)
    await engine.unload_adapter(ONE)


async def test_prompts_are_encoded_and_checked(engine):
    """Text and chats are converted to tokens, and an unknown token id is refused."""
    assert await engine.encode(TokenPrompt(PROMPT)) == PROMPT
    text = await engine.encode(TextPrompt('hi'))
    chat = await engine.encode(ChatPrompt(trajectory={'messages': [{'role': 'user', 'content': 'hi'}]}))
    assert len(text) == 2
    assert len(chat) > 2
    with pytest.raises(InvalidField) as caught:
        await engine.encode(TokenPrompt((1, 320)))
    assert caught.value.field == 'token_ids'


async def test_resetting_the_prefix_cache_returns_a_count(engine):
    """Resetting the prefix cache returns a count of at least 0."""
    assert await engine.reset_prefix_cache() >= 0


async def test_cache_use_is_reported_while_sequences_run(real_engine):
    """The use of the key-value cache is a fraction above 0 while sequences run, on every engine."""
    async with aclosing(real_engine.generate(make_request(max_tokens=12, num_samples=2))) as events:
        usage = [real_engine.load.kv_usage async for event in events if isinstance(event, TokensSampled)]
    assert 0 < max(usage) <= 1
    assert min(usage) >= 0


async def test_workers_on_a_cpu_report_no_gpu_memory(real_engine):
    """An engine on a CPU reports no GPU memory, even if vLLM's workers are queried."""
    waiting = asyncio.create_task(real_engine.wait_until_failed())
    sampled = await run(real_engine, make_request(max_tokens=2))
    assert len(sampled.tokens[0]) == 2
    waiting.cancel()
    await asyncio.wait({waiting})
    assert real_engine.device_memory == {}
