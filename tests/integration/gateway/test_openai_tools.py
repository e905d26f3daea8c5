"""Tests tool calls at the OpenAI API with OpenAI's SDK; the engine samples given pieces of text."""

import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.scripted_engine import ScriptedEngine

ASK: list[Any] = [{'role': 'user', 'content': 'Is it warm in Paris?'}]
WEATHER: dict[str, Any] = {
    'type': 'function',
    'function': {
        'name': 'get_weather',
        'description': 'Current weather',
        'parameters': {
            'type': 'object',
            'properties': {'city': {'$ref': '#/$defs/City'}, 'days': {'type': 'integer'}},
            'required': ['city'],
            '$defs': {'City': {'type': 'string'}},
        },
        'strict': True,
    },
}
CLOCK: dict[str, Any] = {'type': 'function', 'function': {'name': 'clock'}}
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}\n</tool_call>'
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


def scripted(running: OpenAiGateway, *answers: Sequence[str]) -> ScriptedEngine:
    """Set the answers of the engine, by the index of the sequence, and return the engine."""
    engine = running.engine
    assert isinstance(engine, ScriptedEngine)
    engine.answers = dict(enumerate(answers))
    return engine


def last_chat(engine: ScriptedEngine) -> Any:
    """Return the last chat that the engine encoded."""
    return engine.chats[-1].trajectory


async def ask(running: OpenAiGateway, **fields: Any) -> Any:
    """Return a complete response to a question with tools."""
    request: dict[str, Any] = {'model': 'tiny', 'messages': ASK, 'tools': [WEATHER, CLOCK], **fields}
    return await running.client().chat.completions.create(**request)


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
    """A stream has the same text and calls as the complete response, and each call begins with index, id and name."""
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
    """Broken, cut, undeclared and thought calls are returned unchanged as text, complete or streamed."""
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
    """Interleaved choices have separate calls, and a limit on tokens keeps its finish reason."""
    scripted(running, SPLIT_CALL, ('No', ' <tool', ' idea'), ('Hm ', CALL, 'x', 'x', 'x', 'x', 'x', 'x', 'x'))
    chunks = await ask_stream(running, n=3, max_tokens=8)
    call = ('get_weather', {'city': 'Paris', 'days': 2})
    assert joined(chunks, 0) == ('', [call], 'tool_calls')
    assert joined(chunks, 1) == ('No <tool idea', [], 'stop')
    assert joined(chunks, 2) == ('Hmxxxxxx', [call], 'length')
    whole = await ask(running, n=3, max_tokens=8)
    assert [choice.message.content for choice in whole.choices] == [None, 'No <tool idea', 'Hmxxxxxx']


async def test_only_one_call_without_parallel_calls(running: OpenAiGateway) -> None:
    """With `parallel_tool_calls: false`, a choice ends after its first call, and the usage counts all tokens."""
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
    """A required call constrains the completion to a list of calls of any tool, with moved references."""
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
    """A named function constrains the completion to one call of it, and the prompt still has all tools."""
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
    """With the choice `none`, the prompt has no tools, and text that looks like a call is text."""
    engine = scripted(running, (CALL,))
    response = await ask(running, tool_choice='none', response_format={'type': 'json_object'})
    assert (response.choices[0].message.content, response.choices[0].message.tool_calls) == (CALL, None)
    assert 'tools' not in last_chat(engine)
    assert engine.forms[-1] is not None


async def test_results_of_calls_reach_the_chat_template(running: OpenAiGateway) -> None:
    """Calls and results of earlier turns are part of the prompt, also in the form in which a response returned them."""
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
    """System and developer messages before all others become one system message."""
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
    """The SDK's helpers for parsed content and parsed arguments work with the schemas that they send."""
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


async def test_values_that_clients_always_send_are_accepted(running: OpenAiGateway) -> None:
    """Defaults that ask for nothing are accepted, and choices of tools without tools if they require no call."""
    scripted(running, ('Hi',))
    loose = {'type': 'json_schema', 'json_schema': {'name': 'a', 'schema': {'type': 'object'}, 'strict': False}}
    fields: list[dict[str, Any]] = [
        {'n': 1, 'logit_bias': {}, 'user': 'u', 'store': False, 'metadata': {'a': 'b'}, 'service_tier': 'default'},
        {'tools': [], 'tool_choice': 'auto', 'parallel_tool_calls': True},
        {'tool_choice': 'none', 'parallel_tool_calls': False},
        {'modalities': ['text'], 'verbosity': 'medium', 'prompt_cache_key': 'k', 'top_logprobs': 0, 'logprobs': False},
        {'stream': True, 'stream_options': {'include_usage': True, 'include_obfuscation': False}},
        {'response_format': {'type': 'text'}, 'seed': 1, 'max_completion_tokens': 5, 'service_tier': 'auto'},
        {'response_format': loose},
        {'tools': [CLOCK], 'response_format': {'type': 'text'}, 'functions': None, 'function_call': None},
    ]
    for values in fields:
        response = await running.post('/chat/completions', {'model': 'tiny', 'messages': ASK, **values})
        assert response.status_code == 200, (values, response.text)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({'tools': 'x'}, 'tools'),
    ({'tools': [{'type': 'custom', 'custom': {'name': 'a'}}]}, 'tools[0].type'),
    ({'tools': [{'type': 'function'}]}, 'tools[0].function'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a b'}}]}, 'tools[0].function.name'),
    ({'tools': [{'type': 'function', 'function': {'name': 'x' * 65}}]}, 'tools[0].function.name'),
    ({'tools': [CLOCK, CLOCK]}, 'tools[1].function.name'),
    ({'tools': [CLOCK] * 129}, 'tools'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'parameters': {'type': 'array'}}}]},
     'tools[0].function.parameters'),
    ({'tools': [{'type': 'function', 'function': {'name': 'a', 'arguments': {}}}]}, 'tools[0].function.arguments'),
    ({'tool_choice': 'required'}, 'tool_choice'),
    ({'tools': [CLOCK], 'tool_choice': 'always'}, 'tool_choice.type'),
    ({'tools': [CLOCK], 'tool_choice': {'type': 'function'}}, 'tool_choice.function'),
    ({'tools': [CLOCK], 'tool_choice': {'type': 'function', 'function': {'name': 'b'}}}, 'tool_choice.function.name'),
    ({'tools': [CLOCK], 'tool_choice': {'type': 'allowed_tools'}}, 'tool_choice.type'),
    ({'tools': [CLOCK], 'tool_choice': 3}, 'tool_choice'),
    ({'tools': [CLOCK], 'parallel_tool_calls': 'no'}, 'parallel_tool_calls'),
    ({'tools': [CLOCK], 'response_format': {'type': 'json_object'}}, 'response_format'),
    ({'functions': [{'name': 'a'}]}, 'functions'),
    ({'function_call': 'auto'}, 'function_call'),
    ({'logit_bias': {'5': 1}}, 'logit_bias'),
    ({'modalities': ['text', 'audio']}, 'modalities'),
    ({'verbosity': 'low'}, 'verbosity'),
    ({'service_tier': 'flex'}, 'service_tier'),
    ({'stream': True, 'stream_options': {'include_obfuscation': True}}, 'stream_options.include_obfuscation'),
    ({'messages': [*ASK, {'role': 'developer', 'content': 'Hi'}]}, 'messages[1].role'),
    ({'messages': [*ASK, {'role': 'assistant', 'tool_calls': [{'function': {'name': 'a', 'arguments': '{"a":'}}]}]},
     'messages[1].tool_calls[0].function.arguments'),
]  # fmt: skip


async def test_wrong_tools_are_named(running: OpenAiGateway) -> None:
    """A wrong or unsupported parameter of tools is refused with status 400 and its name, before any sampling."""
    mismatches: list[Any] = []
    for fields, param in REFUSED:
        response = await running.post('/chat/completions', {'model': 'tiny', 'messages': ASK, **fields})
        error = response.json()['error']
        if (response.status_code, error['param'], error['reason']) != (400, param, 'INVALID_FIELD'):
            mismatches.append((fields, response.status_code, error))
    assert mismatches == []
    assert isinstance(running.engine, ScriptedEngine)
    assert running.engine.forms == []


def nested(depth: int) -> dict[str, Any]:
    """Return a schema of nested lists."""
    schema: dict[str, Any] = {'type': 'string'}
    for _ in range(depth):
        schema = {'type': 'array', 'items': schema}
    return {'type': 'object', 'properties': {'a': schema}}


async def test_large_schemas_are_refused_only_where_they_are_enforced(running: OpenAiGateway) -> None:
    """A schema that is too deep is refused; large schemas are refused if they would have to be enforced."""
    scripted(running, ('Hi',))
    deep = {'type': 'function', 'function': {'name': 'a', 'parameters': nested(30)}}
    response = await running.post('/chat/completions', {'model': 'tiny', 'messages': ASK, 'tools': [deep]})
    assert (response.status_code, response.json()['error']['param']) == (400, 'tools[0].function.parameters')
    large = {'type': 'object', 'description': 'x' * 1000}
    tools = [{'type': 'function', 'function': {'name': f'f{index}', 'parameters': large}} for index in range(100)]
    assert (await ask(running, tools=tools)).choices[0].message.content == 'Hi'
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(running, tools=tools, tool_choice='required')
    assert (raised.value.param, 'fewer tools' in raised.value.message) == ('tools', True)
    edge = {'type': 'function', 'function': {'name': 'a', 'parameters': nested(21)}}
    assert (await ask(running, tools=[edge], tool_choice='required')).choices[0].message.content == 'Hi'


async def test_engines_without_structured_output_refuse_required_calls(tmp_path: Path) -> None:
    """An engine without structured output serves the choice `auto`, and refuses required calls with the cure."""
    async with openai_gateway(tmp_path, ScriptedEngine(is_form_supported=False)) as running:
        scripted(running, (CALL,))
        assert (await ask(running)).choices[0].finish_reason == 'tool_calls'
        for choice in ('required', {'type': 'function', 'function': {'name': 'clock'}}):
            for is_streamed in (False, True):
                with pytest.raises(openai.BadRequestError) as raised:
                    await ask(running, tool_choice=choice, stream=is_streamed)
                assert raised.value.param == 'tool_choice'
                assert 'use "auto" or "none"' in raised.value.message


async def test_base_models_whose_template_has_no_tools_refuse_them(tmp_path: Path) -> None:
    """A base model whose chat template does not render tools refuses tools, and not the choice `none`."""
    async with openai_gateway(tmp_path, ScriptedEngine(tool_call_format='')) as running:
        scripted(running, ('Hi',))
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(running)
        assert (raised.value.param, "'tiny'" in raised.value.message) == ('tools', True)
        assert (await ask(running, tool_choice='none')).choices[0].message.content == 'Hi'


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
