"""Tests of tool calls over the OpenAI API with OpenAI's SDK; the engine samples predefined pieces of text."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.openai_tools import ASK, CALL, WEATHER, ask, last_chat, scripted
from fixtures.scripted_engine import ScriptedEngine

SPLIT_CALL = (
    '<tool',
    '_call>',
    '\n{"name": "get_we',
    'ather", "arguments"',
    ': {"city": "Pa',
    'ris", "days": 2}}\n</tool',
    '_call>',
)


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with a scripted engine."""
    async with openai_gateway(tmp_path, ScriptedEngine()) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


async def ask_stream(running: OpenAiGateway, **fields: Any) -> list[Any]:
    """Return the chunks of the response to a question with tools."""
    return [chunk async for chunk in await ask(running, stream=True, **fields)]


def joined(chunks: list[Any], index: int = 0) -> tuple[str, list[tuple[str, Any]], str]:
    """Return the text, the calls and the finish reason of a streamed choice."""
    text, reason = '', ''
    calls: dict[int, list[str]] = {}
    for choice in (choice for chunk in chunks for choice in chunk.choices if choice.index == index):
        text += choice.delta.content or ''
        reason = choice.finish_reason or reason
        for call in choice.delta.tool_calls or []:
            parts = calls.setdefault(call.index, ['', ''])
            parts[0] += call.function.name or ''
            parts[1] += call.function.arguments or ''
    return text, [(name, json.loads(arguments)) for name, arguments in calls.values()], reason


async def test_calls_are_separated_from_the_text(running: OpenAiGateway) -> None:
    """A response has the text before the calls, each call with an id and JSON arguments, and its own finish reason."""
    engine = scripted(running, ('Let me look.\n', *SPLIT_CALL, '\n', CALL.replace('Paris', 'Rome'), '\n'))
    response = await ask(running)
    choice = response.choices[0]
    assert (choice.finish_reason, choice.message.content) == ('tool_calls', 'Let me look.')
    calls = choice.message.tool_calls
    assert [json.loads(call.function.arguments)['city'] for call in calls] == ['Paris', 'Rome']
    assert {(call.type, call.function.name) for call in calls} == {('function', 'get_weather')}
    assert len({call.id for call in calls}) == 2
    assert all(len(call.id) == 9 and call.id.isalnum() for call in calls)
    tools = last_chat(engine)['tools']
    assert [tool['function']['name'] for tool in tools] == ['get_weather', 'clock']
    assert tools[0]['function']['description'] == 'Current weather'
    assert tools[0]['function']['parameters'] == WEATHER['function']['parameters']
    assert engine.forms[-1] is None


async def test_streamed_calls_equal_the_complete_ones(running: OpenAiGateway) -> None:
    """A stream has the text and calls of the complete response; each call begins with index, id and name."""
    scripted(running, ('Look', ':', '\n\n', *SPLIT_CALL, CALL.replace('Paris', 'Rome')))
    chunks = await ask_stream(running, stream_options={'include_usage': True})
    expected = [('get_weather', {'city': city, 'days': 2}) for city in ('Paris', 'Rome')]
    assert joined(chunks) == ('Look:', expected, 'tool_calls')
    deltas = [call for chunk in chunks[:-1] for call in chunk.choices[0].delta.tool_calls or []]
    assert [(call.index, call.type) for call in deltas if call.id] == [(0, 'function'), (1, 'function')]
    assert chunks[-1].usage.completion_tokens == 4 + len(SPLIT_CALL)
    assert chunks[-2].model_extra['twinkle']['choices'][0]['version_spans']
    async with running.client().chat.completions.stream(model='tiny', messages=ASK, tools=[WEATHER]) as stream:
        final = await stream.get_final_completion()
    assert [call.function.arguments for call in final.choices[0].message.tool_calls or []] == [
        '{"city":"Paris","days":2}',
        '{"city":"Rome","days":2}',
    ]


@pytest.mark.parametrize(
    'pieces',
    [
        ('a <tool', 'box> b',),
        ('<tool_call>\n', '{"name": "get_weather", "arguments": {"city": "Par'),
        ('<tool_call>{"name": "get_weather", "arguments": {city: 1}}</tool_call>',),
        ('<tool_call>{"name": "get_weather", "arguments": [1]}</tool_call>',),
        (CALL.replace('get_weather', 'rm_rf'),),
        ('<think>', CALL, '</think> no'),
        ('{"name": "get_weather", "arguments": {}}',),
    ],
)  # fmt: skip
async def test_text_that_only_looks_like_a_call_is_text(running: OpenAiGateway, pieces: Sequence[str]) -> None:
    """Malformed and incomplete calls, calls to unknown tools and calls in thoughts are text, complete or streamed."""
    scripted(running, pieces)
    response = await ask(running)
    assert response.choices[0].message.content == ''.join(pieces)
    assert response.choices[0].message.tool_calls is None
    assert response.choices[0].finish_reason == 'stop'
    assert joined(await ask_stream(running)) == (''.join(pieces), [], 'stop')


async def test_call_in_a_thought_of_the_prompt_is_text(tmp_path: Path) -> None:
    """If the prompt opens the thought, only calls after its end count."""
    async with openai_gateway(tmp_path, ScriptedEngine(tail='<think>\n')) as running:
        scripted(running, (CALL, '</think>\n', CALL))
        response = await ask(running)
        assert response.choices[0].message.content == f'{CALL}</think>'
        assert len(response.choices[0].message.tool_calls) == 1


async def test_choices_of_one_stream_are_separate(running: OpenAiGateway) -> None:
    """Interleaved choices have separate calls, and a token limit keeps its finish reason."""
    scripted(running, SPLIT_CALL, ('No', ' <tool', ' idea'), ('Hm ', CALL, 'x', 'x', 'x', 'x', 'x', 'x', 'x'))
    chunks = await ask_stream(running, n=3, max_tokens=8)
    call = ('get_weather', {'city': 'Paris', 'days': 2})
    assert joined(chunks, 0) == ('', [call], 'tool_calls')
    assert joined(chunks, 1) == ('No <tool idea', [], 'stop')
    assert joined(chunks, 2) == ('Hmxxxxxx', [call], 'length')
    whole = await ask(running, n=3, max_tokens=8)
    assert [choice.message.content for choice in whole.choices] == [None, 'No <tool idea', 'Hmxxxxxx']


async def test_only_one_call_without_parallel_calls(running: OpenAiGateway) -> None:
    """A choice without parallel calls ends after its first call; the usage counts all tokens."""
    scripted(running, ('a', CALL, CALL, 'b'))
    response = await ask(running, parallel_tool_calls=False)
    assert (response.choices[0].message.content, len(response.choices[0].message.tool_calls)) == ('a', 1)
    assert response.usage.completion_tokens == 4
    text, calls, reason = joined(await ask_stream(running, parallel_tool_calls=False))
    assert (text, len(calls), reason) == ('a', 1, 'tool_calls')


async def test_token_ids_and_logprobs_include_hidden_tokens(running: OpenAiGateway) -> None:
    """Log-probabilities and token ids cover the tokens of calls, complete or streamed."""
    scripted(running, SPLIT_CALL)
    extra = {'logprobs': True, 'extra_body': {'return_token_ids': True}}
    response = await ask(running, **extra)
    assert len(response.choices[0].logprobs.content) == len(response.choices[0].model_extra['token_ids']) == 7
    chunks = await ask_stream(running, **extra)
    token_ids = [token for chunk in chunks for token in chunk.choices[0].model_extra['token_ids']]
    assert token_ids == response.choices[0].model_extra['token_ids']


async def test_required_call_is_constrained(running: OpenAiGateway) -> None:
    """A required call constrains the completion to a list of calls of any tool, with adapted references."""
    answer = '[{"name": "get_weather", "parameters": {"city": "Paris"}}, {"name": "clock", "parameters": {}}]'
    engine = scripted(running, (answer[:20], answer[20:]))
    response = await ask(running, tool_choice='required')
    calls = response.choices[0].message.tool_calls
    assert [(call.function.name, call.function.arguments) for call in calls] == [
        ('get_weather', '{"city":"Paris"}'),
        ('clock', '{}'),
    ]
    assert (response.choices[0].finish_reason, response.choices[0].message.content) == ('tool_calls', None)
    form = engine.forms[-1]
    assert form is not None
    schema = form.json_schema
    assert schema is not None
    assert (schema['type'], schema['minItems'], len(schema['items']['anyOf'])) == ('array', 1, 2)
    weather = schema['$defs']['get_weather']
    assert weather['properties']['city'] == {'$ref': '#/$defs/get_weather/$defs/City'}
    assert schema['$defs']['clock'] == {'type': 'object', 'properties': {}}
    assert not engine.chats[-1].is_thinking_enabled
    text, streamed, reason = joined(await ask_stream(running, tool_choice='required', parallel_tool_calls=False))
    assert (text, [name for name, _ in streamed], reason) == ('', ['get_weather'], 'tool_calls')


async def test_named_call_is_constrained_to_its_function(running: OpenAiGateway) -> None:
    """A named function constrains the completion to one call of this function; the prompt still has all tools."""
    engine = scripted(running, ('{"name": "clock", "parameters": {}}',))
    choice = {'type': 'function', 'function': {'name': 'clock'}}
    response = await ask(running, tool_choice=choice)
    assert [call.function.name for call in response.choices[0].message.tool_calls] == ['clock']
    form = engine.forms[-1]
    assert form is not None
    assert form.json_schema is not None
    assert form.json_schema['properties']['name'] == {'const': 'clock'}
    assert len(last_chat(engine)['tools']) == 2


async def test_tools_are_not_used_with_the_choice_none(running: OpenAiGateway) -> None:
    """The choice `none` omits the tools from the prompt, and text that looks like a call is text."""
    engine = scripted(running, (CALL,))
    response = await ask(running, tool_choice='none', response_format={'type': 'json_object'})
    assert (response.choices[0].message.content, response.choices[0].message.tool_calls) == (CALL, None)
    assert 'tools' not in last_chat(engine)
    assert engine.forms[-1] is not None


async def test_results_of_calls_reach_the_chat_template(running: OpenAiGateway) -> None:
    """Calls and results of earlier turns are part of the prompt, even in the format of a response."""
    engine = scripted(running, (CALL,))
    first = (await ask(running)).choices[0].message
    result = {'role': 'tool', 'tool_call_id': first.tool_calls[0].id, 'content': '21 degrees', 'name': 'get_weather'}
    scripted(running, ('It is.',))
    second = await ask(running, messages=[*ASK, first, result])
    assert second.choices[0].message.content == 'It is.'
    assert second.choices[0].finish_reason == 'stop'
    turns = last_chat(engine)['messages']
    assert turns[1]['tool_calls'][0]['function'] == {'name': 'get_weather', 'arguments': {'city': 'Paris', 'days': 2}}
    assert (turns[2]['role'], turns[2]['tool_call_id'], turns[2]['content']) == (
        'tool',
        first.tool_calls[0].id,
        '21 degrees',
    )


async def test_system_and_developer_messages_are_joined(running: OpenAiGateway) -> None:
    """System and developer messages before all other messages become one system message."""
    engine = scripted(running, ('Hi',))
    beginning: list[Any] = [
        {'role': 'system', 'content': 'A'},
        {'role': 'developer', 'content': [{'type': 'text', 'text': 'B'}]},
    ]
    await ask(running, messages=[*beginning, *ASK])
    turns = last_chat(engine)['messages']
    assert [(turn['role'], turn['content']) for turn in turns[:-1]] == [('system', 'A\n\nB')]


class Answer(BaseModel):
    """A parsed answer."""

    is_warm: bool


async def test_parsed_responses_of_the_sdk(running: OpenAiGateway) -> None:
    """The SDK's helpers for parsed content and parsed arguments work with the schemas that these helpers send."""
    scripted(running, ('{"is_warm": true}',))
    client = running.client()
    parsed = await client.chat.completions.parse(model='tiny', messages=ASK, response_format=Answer)
    assert parsed.choices[0].message.parsed == Answer(is_warm=True)
    scripted(running, ('<tool_call>{"name": "Answer", "arguments": {"is_warm": false}}</tool_call>',))
    called = await client.chat.completions.parse(
        model='tiny', messages=ASK, tools=[openai.pydantic_function_tool(Answer)]
    )
    calls = called.choices[0].message.tool_calls
    assert calls is not None
    assert calls[0].function.parsed_arguments == Answer(is_warm=False)


async def test_format_of_the_template_selects_the_parser(tmp_path: Path) -> None:
    """Calls of a base model with plain JSON calls are found in fenced and unfenced JSON."""
    async with openai_gateway(tmp_path, ScriptedEngine(tool_call_format='json')) as running:
        for pieces in (
            ('{"name": "clock"', ', "parameters": {}}'),
            ('```json\n', '[{"name": "clock", "arguments": {}}]', '\n```'),
        ):
            scripted(running, pieces)
            assert joined(await ask_stream(running)) == ('', [('clock', {})], 'tool_calls')
        scripted(running, (CALL.replace('name', 'title'),))
        assert (await ask(running)).choices[0].message.tool_calls is None
