"""Tests of the responses that OpenAI's SDK gets from a gateway: completions and chats, complete and streamed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.openai_gateway import (
    CHECKPOINT,
    DELETED_RUN,
    FOREIGN_RUN,
    FULL_RUN,
    RUN,
    UNPUBLISHED_RUN,
    UNSERVED_RUN,
    OpenAiGateway,
    openai_gateway,
)
from fixtures.running_gateway import ADMIN, ADMIN_KEY
from fixtures.sampled import lora_weights
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc
from twinkle_services.sampler.domain.adapter import CheckpointFacts

CHAT = [{'role': 'system', 'content': 'Be short.'}, {'role': 'user', 'content': [{'type': 'text', 'text': 'Hi!'}]}]
CHAT_TOKENS = 1 + len('Be short.') + len('Hi!') + 1
"""Tokens of the chat in the fake engine: one per byte, one before the chat and one after the chat."""


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway that serves the OpenAI API."""
    async with openai_gateway(tmp_path, FakeSamplerEngine()) as gateway:
        yield gateway


async def read_stream(stream: Any) -> list[Any]:
    """Return all chunks of a stream."""
    return [chunk async for chunk in stream]


def texts_of(chunks: list[Any]) -> dict[int, str]:
    """Return the joined text of each choice."""
    texts: dict[int, str] = {}
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, '') + choice.text
    return texts


async def test_chat_reports_the_counts_of_the_engine(running: OpenAiGateway) -> None:
    """Message, finish reason and token counts are those of the engine."""
    response = await running.client().chat.completions.create(
        model='tiny', messages=CHAT, max_completion_tokens=5, seed=3, extra_body={'return_token_ids': True}
    )
    choice = response.choices[0]
    assert (response.object, response.model, choice.message.role) == ('chat.completion', 'tiny', 'assistant')
    assert len(choice.message.content) == len(choice.model_extra['token_ids']) == 5
    assert choice.finish_reason == 'length'
    assert len(response.model_extra['prompt_token_ids']) == CHAT_TOKENS
    usage = response.usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (CHAT_TOKENS, 5, CHAT_TOKENS + 5)
    assert usage.prompt_tokens_details.cached_tokens == 0
    assert response.system_fingerprint


async def test_streamed_chat_equals_the_complete_one(running: OpenAiGateway) -> None:
    """The chunks of a chat add up to the complete response; the last two chunks have finish reason and usage."""
    client = running.client()
    request: dict[str, Any] = {'model': 'tiny', 'messages': CHAT, 'max_tokens': 7, 'seed': 1, 'n': 2}
    whole = await client.chat.completions.create(**request)
    stream = await client.chat.completions.create(**request, stream=True, stream_options={'include_usage': True})
    chunks = await read_stream(stream)
    contents = ['', '']
    for chunk in chunks:
        for choice in chunk.choices:
            contents[choice.index] += choice.delta.content or ''
    assert contents == [choice.message.content for choice in whole.choices]
    assert contents[0] != contents[1]
    assert chunks[0].choices[0].delta.role == 'assistant'
    assert (chunks[-1].choices, chunks[-1].usage) == ([], whole.usage)
    assert whole.usage.completion_tokens == 14
    assert chunks[-2].choices[0].finish_reason == 'length'
    assert chunks[-2].model_extra['twinkle'] == whole.model_extra['twinkle']


async def test_completions_of_many_prompts_keep_their_order(running: OpenAiGateway) -> None:
    """Choice `i * n + j` is completion j of prompt i, for text and tokens, streamed or complete."""
    client = running.client()
    texts: dict[str, Any] = {'model': 'tiny', 'prompt': ['one', 'two', 'three'], 'n': 2, 'seed': 5, 'max_tokens': 6}
    whole = await client.completions.create(**texts)
    assert [choice.index for choice in whole.choices] == [0, 1, 2, 3, 4, 5]
    single = await client.completions.create(**{**texts, 'prompt': [byte + 3 for byte in b'two']})
    assert [choice.text for choice in single.choices] == [choice.text for choice in whole.choices[2:4]]
    lists = {**texts, 'prompt': [[byte + 3 for byte in text.encode()] for text in texts['prompt']]}
    chunks = await read_stream(await client.completions.create(**lists, stream=True))
    assert texts_of(chunks) == {choice.index: choice.text for choice in whole.choices}
    assert whole.usage.prompt_tokens == len('onetwothree')
    assert whole.usage.completion_tokens == 36


async def test_every_name_resolves_to_its_weights(running: OpenAiGateway) -> None:
    """A run's name selects its newest version, `run@N` selects version N, and a path selects a checkpoint."""
    facts = CheckpointFacts(path=CHECKPOINT, digest='d' * 64, step_count=7)
    running.source.checkpoints['default', CHECKPOINT] = (facts, lora_weights(0, adapter_id=RUN))
    client = running.client()
    spans: dict[str, Any] = {}
    texts: dict[str, str] = {}
    for name in ('tiny', RUN, f'{RUN}@1', f'{RUN}@2', CHECKPOINT):
        response = await client.completions.create(model=name, prompt='Hello', seed=1, max_tokens=4)
        twinkle = response.model_extra['twinkle']
        assert response.model == name
        assert twinkle['base_model'] == 'tiny'
        spans[name] = [(span['version'], span['end_token']) for span in twinkle['choices'][0]['version_spans']]
        texts[name] = response.choices[0].text
    assert spans == {'tiny': [(0, 4)], RUN: [(2, 4)], f'{RUN}@1': [(1, 4)], f'{RUN}@2': [(2, 4)], CHECKPOINT: [(7, 4)]}
    assert texts[RUN] == texts[f'{RUN}@2'] != texts[f'{RUN}@1']
    assert len(set(texts.values())) == 4


async def test_names_of_tinker_resolve_at_both_prefixes(running: OpenAiGateway) -> None:
    """Tinker's path, alone or after its base model, selects the checkpoint that was saved for sampling."""
    native = f'twinkle://{RUN}/weights/best.sampler'
    facts = CheckpointFacts(path=native, digest='d' * 64, step_count=7)
    running.source.checkpoints['default', native] = (facts, lora_weights(0, adapter_id=RUN))
    path = f'tinker://{RUN}/sampler_weights/best'
    names = (native, path, f'tiny;{path}', f'hf://tiny;{path}', f'tiny;{native}')
    texts: set[str] = set()
    for prefix in ('/v1', '/oai/api/v1'):
        client = running.client(prefix=prefix)
        assert {model.id async for model in client.models.list()} == {'tiny', RUN, f'{RUN}@2'}
        for name in names:
            response = await client.completions.create(model=name, prompt='Hello', seed=1, max_tokens=4)
            assert response.model == name
            assert response.model_extra['twinkle']['choices'][0]['version_spans'][0]['version'] == 7
            texts.add(response.choices[0].text)
            assert (await client.models.retrieve(name)).id == name
        chat = await client.chat.completions.create(model=path, messages=CHAT, max_tokens=2)
        assert chat.usage.completion_tokens == 2
        version = await client.completions.create(model=f'tiny;{RUN}@1', prompt='Hello', max_tokens=1)
        assert version.model_extra['twinkle']['choices'][0]['version_spans'][0]['version'] == 1
    assert len(texts) == 1


async def test_every_listed_model_can_be_sampled(running: OpenAiGateway) -> None:
    """Every listed model can be sampled; unpublished, deleted, unserved and full-parameter runs are not listed."""
    client = running.client()
    names = [model.id async for model in client.models.list()]
    for name in names:
        response = await client.completions.create(model=name, prompt='Hello', max_tokens=1)
        assert response.usage.completion_tokens == 1
    assert set(names) == {'tiny', RUN, f'{RUN}@2'}
    catalogue = catalogue_service_pb2_grpc.CatalogueServiceStub(running.gateway.channel)
    runs = await catalogue.ListRuns(catalogue_service_pb2.ListRunsRequest(), metadata=ADMIN)
    assert {run.run_id for run in runs.runs} == {RUN, UNPUBLISHED_RUN, DELETED_RUN, FULL_RUN, UNSERVED_RUN}


async def test_models_are_the_base_model_and_the_callers_runs(running: OpenAiGateway) -> None:
    """Each caller lists the base model, the caller's runs and their newest versions, and can retrieve every name."""
    client = running.client()
    models = {model.id: model async for model in client.models.list()}
    assert set(models) == {'tiny', RUN, f'{RUN}@2'}
    assert models[RUN].model_extra['parent'] == 'tiny'
    assert models[RUN].model_extra['twinkle']['version'] == 2
    for name in ('tiny', RUN, f'{RUN}@2', CHECKPOINT):
        assert (await client.models.retrieve(name)).id == name
    older = await client.models.retrieve(f'{RUN}@1')
    assert older.model_extra['twinkle']['version'] == 1
    alice = running.client((await running.gateway.make_key('alice')).secret)
    assert {model.id async for model in alice.models.list()} == {'tiny', FOREIGN_RUN, f'{FOREIGN_RUN}@2'}


async def test_chat_logprobs_name_tokens_and_bytes(running: OpenAiGateway) -> None:
    """Each token has its text, bytes, log-probability and the requested number of alternatives."""
    client = running.client()
    request: dict[str, Any] = {'model': 'tiny', 'messages': CHAT, 'max_tokens': 3, 'logprobs': True, 'top_logprobs': 2}
    whole = await client.chat.completions.create(**request, seed=1)
    tokens = whole.choices[0].logprobs.content
    assert ''.join(token.token for token in tokens) == whole.choices[0].message.content
    assert all(bytes(token.bytes).decode() == token.token and token.logprob < 0 for token in tokens)
    assert [[alternative.token for alternative in token.top_logprobs] for token in tokens] == [['a', 'b']] * 3
    chunks = await read_stream(await client.chat.completions.create(**request, seed=1, stream=True))
    streamed = [chunk.choices[0].logprobs.content for chunk in chunks if chunk.choices[0].logprobs]
    assert [token for content in streamed for token in content] == tokens
    plain = await client.chat.completions.create(model='tiny', messages=CHAT, max_tokens=3, logprobs=True, seed=1)
    assert [token.logprob for token in plain.choices[0].logprobs.content] == [token.logprob for token in tokens]
    assert all(token.top_logprobs == [] for token in plain.choices[0].logprobs.content)


async def test_completion_logprobs_cover_an_echoed_prompt(running: OpenAiGateway) -> None:
    """An echoed prompt's tokens come first, without a log-probability for the first; offsets count characters."""
    response = await running.client().completions.create(
        model='tiny', prompt='abc', echo=True, logprobs=1, max_tokens=2, seed=1
    )
    logprobs = response.choices[0].logprobs
    assert response.choices[0].text.startswith('abc')
    assert len(response.choices[0].text) == len(logprobs.tokens) == len(logprobs.token_logprobs) == 5
    assert logprobs.text_offset == [0, 1, 2, 3, 4]
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs[0] is None
    assert all(logprob < 0 for logprob in logprobs.token_logprobs[1:])
    scored = await running.client().completions.create(
        model='tiny', prompt='abc', echo=True, logprobs=1, max_tokens=0, seed=1
    )
    assert scored.choices[0].text == 'abc'
    assert scored.choices[0].logprobs.token_logprobs == logprobs.token_logprobs[:3]
    assert scored.usage.completion_tokens == 0


async def test_stop_token_ends_with_stop(running: OpenAiGateway) -> None:
    """A stop token ends a sequence with the finish reason `stop`."""
    client = running.client()
    request: dict[str, Any] = {'model': 'tiny', 'prompt': 'Hello', 'seed': 1, 'max_tokens': 9}
    first = await client.completions.create(**request, extra_body={'return_token_ids': True})
    stop = first.choices[0].model_extra['token_ids'][3]
    response = await client.completions.create(**request, extra_body={'stop_token_ids': [stop], 'ignore_eos': True})
    assert response.choices[0].finish_reason == 'stop'
    assert response.choices[0].text == first.choices[0].text[:4]
    assert response.usage.completion_tokens == 4


async def test_blocking_client_streams(running: OpenAiGateway) -> None:
    """The SDK's blocking client gets complete and streamed responses."""

    def complete_and_stream() -> tuple[str, str]:
        with OpenAI(base_url=running.base_url, api_key=ADMIN_KEY, max_retries=0) as client:
            request: dict[str, Any] = {'model': RUN, 'messages': CHAT, 'max_tokens': 8, 'seed': 1}
            whole = client.chat.completions.create(**request).choices[0].message.content
            with client.chat.completions.create(**request, stream=True) as stream:
                return whole or '', ''.join(chunk.choices[0].delta.content or '' for chunk in stream)

    whole, streamed = await asyncio.to_thread(complete_and_stream)
    assert whole == streamed
    assert len(whole) == 8


@pytest.mark.slow
async def test_two_hundred_concurrent_streams_finish(tmp_path: Path) -> None:
    """200 concurrent streams finish with distinct texts and all tokens."""
    async with openai_gateway(tmp_path, FakeSamplerEngine(max_sequences=32)) as running:
        client = running.client()

        async def complete(seed: int) -> str:
            stream = await client.completions.create(
                model=f'{RUN}@{1 + seed % 2}', prompt='Hello', max_tokens=16, seed=seed, stream=True
            )
            return texts_of(await read_stream(stream))[0]

        texts = await asyncio.gather(*map(complete, range(200)))
    assert all(len(text) == 16 for text in texts)
    assert len(set(texts)) == 200
