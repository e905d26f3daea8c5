"""Tests of Anthropic's `/v1/messages`; the engine samples predefined pieces of text."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.openai_tools import CALL, last_chat, scripted
from fixtures.running_gateway import ADMIN_KEY
from fixtures.scripted_engine import ScriptedEngine

HELLO: list[Any] = [{'role': 'user', 'content': 'Hi'}]
TOOL: dict[str, Any] = {
    'name': 'get_weather',
    'description': 'Current weather',
    'input_schema': {'type': 'object', 'properties': {'city': {'type': 'string'}}},
}
HEADERS = {'x-api-key': ADMIN_KEY, 'anthropic-version': '2023-06-01'}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with a scripted engine."""
    async with openai_gateway(tmp_path, ScriptedEngine()) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


async def send(running: OpenAiGateway, **fields: Any) -> Any:
    """Send a message, check that the call succeeds, and return the response document."""
    body = {'model': 'tiny', 'max_tokens': 50, 'messages': HELLO, **fields}
    async with httpx.AsyncClient(timeout=60, headers=HEADERS) as client:
        response = await client.post(f'{running.base_url}/messages', json=body)
    assert response.status_code == 200, response.text
    return response.json()


async def events_of(running: OpenAiGateway, **fields: Any) -> list[Any]:
    """Return the events of a stream, and check that each event has its type as its name."""
    body = {'model': 'tiny', 'max_tokens': 50, 'messages': HELLO, 'stream': True, **fields}
    events: list[Any] = []
    async with (
        httpx.AsyncClient(timeout=60, headers=HEADERS) as client,
        client.stream('POST', f'{running.base_url}/messages', json=body) as response,
    ):
        text = (await response.aread()).decode()
    for block in text.removesuffix('\n\n').split('\n\n'):
        name, data = block.split('\n')
        events.append(json.loads(data.removeprefix('data: ')))
        assert name == f'event: {events[-1]["type"]}'
    return events


async def test_text_is_a_block(running: OpenAiGateway) -> None:
    """The text is one block, with the stop reason and the usage; the system prompt is first."""
    engine = scripted(running, ('Hello', ' you'))
    system = [{'type': 'text', 'text': 'Be short', 'cache_control': {'type': 'ephemeral'}}]
    message = await send(running, system=system, metadata={'user_id': 'u'}, top_k=5)
    assert message['content'] == [{'type': 'text', 'text': 'Hello you'}]
    assert (message['type'], message['role'], message['stop_reason']) == ('message', 'assistant', 'end_turn')
    assert message['usage']['output_tokens'] == 2
    assert message['twinkle']['base_model'] == 'tiny'
    turns = last_chat(engine)['messages']
    assert [(turn['role'], turn['content']) for turn in turns] == [('system', 'Be short'), ('user', 'Hi')]
    assert (await send(running, max_tokens=1))['stop_reason'] == 'max_tokens'


async def test_calls_and_results_are_blocks(running: OpenAiGateway) -> None:
    """A call is a block of tool use; its result is a block of the user's next message."""
    engine = scripted(running, ('I look.\n', CALL))
    first = await send(running, tools=[TOOL])
    assert first['stop_reason'] == 'tool_use'
    assert [block['type'] for block in first['content']] == ['text', 'tool_use']
    call = first['content'][1]
    assert (call['name'], call['input']) == ('get_weather', {'city': 'Paris', 'days': 2})
    scripted(running, ('It is warm.',))
    result = {'type': 'tool_result', 'tool_use_id': call['id'], 'content': [{'type': 'text', 'text': 'warm'}]}
    follow_up = {'role': 'user', 'content': [{'type': 'text', 'text': 'So?'}, result]}
    turn = {'role': 'assistant', 'content': first['content']}
    second = await send(running, messages=[*HELLO, turn, follow_up], tools=[TOOL])
    assert second['content'][0]['text'] == 'It is warm.'
    turns = last_chat(engine)['messages']
    assert [turn['role'] for turn in turns] == ['user', 'assistant', 'tool', 'user']
    assert turns[1]['tool_calls'][0]['function']['arguments'] == {'city': 'Paris', 'days': 2}
    assert (turns[2]['tool_call_id'], turns[2]['content']) == (call['id'], 'warm')


async def test_events_build_the_message(running: OpenAiGateway) -> None:
    """The blocks from the events equal those of the complete message."""
    scripted(running, ('I ', 'look.', CALL, 'Then'))
    whole = await send(running, tools=[TOOL])
    events = await events_of(running, tools=[TOOL])
    assert [events[0]['type'], events[-2]['type'], events[-1]['type']] == [
        'message_start',
        'message_delta',
        'message_stop',
    ]
    blocks: list[Any] = []
    for event in events:
        if event['type'] == 'content_block_start':
            assert event['index'] == len(blocks)
            blocks.append({**event['content_block'], 'json': ''})
        elif event['type'] == 'content_block_delta':
            block = blocks[event['index']]
            block['text'] = block.get('text', '') + event['delta'].get('text', '')
            block['json'] += event['delta'].get('partial_json', '')
    assert [block['type'] for block in blocks] == ['text', 'tool_use', 'text']
    assert [blocks[0]['text'], blocks[2]['text']] == [whole['content'][0]['text'], whole['content'][2]['text']]
    assert json.loads(blocks[1]['json']) == whole['content'][1]['input']
    assert events[-2]['delta']['stop_reason'] == 'tool_use'
    assert events[-2]['usage'] == whole['usage']


async def test_choices_of_tools_are_converted(running: OpenAiGateway) -> None:
    """The choices `any` and `tool` constrain the completion, and `none` omits the tools."""
    engine = scripted(running, ('{"name": "get_weather", "parameters": {}}',))
    for choice in ({'type': 'any', 'disable_parallel_tool_use': True}, {'type': 'tool', 'name': 'get_weather'}):
        message = await send(running, tools=[TOOL], tool_choice=choice)
        assert [(block['type'], block['input']) for block in message['content']] == [('tool_use', {})]
        form = engine.forms[-1]
        assert form is not None
        assert form.json_schema is not None
        assert form.json_schema['type'] == 'object'
    await send(running, tools=[TOOL], tool_choice={'type': 'none'})
    assert (engine.forms[-1], 'tools' in last_chat(engine)) == (None, False)


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({'max_tokens': None}, 'max_tokens'),
    ({'messages': []}, 'messages'),
    ({'messages': [{'role': 'system', 'content': 'Hi'}]}, 'messages[0].role'),
    ({'messages': [{'role': 'user', 'content': []}]}, 'messages[0].content'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'image'}]}]}, 'messages[0].content[0].type'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'text'}]}]}, 'messages[0].content[0].text'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'tool_use'}]}]}, 'messages[0].content[0].type'),
    ({'messages': [{'role': 'user', 'content': [{'type': 'tool_result'}]}]}, 'messages[0].content[0].tool_use_id'),
    ({'temperature': 1.5}, 'temperature'),
    ({'thinking': {'type': 'enabled', 'budget_tokens': 1024}}, 'thinking.type'),
    ({'tools': [{'name': 'a'}]}, 'tools[0].input_schema'),
    ({'tools': [{'type': 'bash_20250124', 'name': 'bash'}]}, 'tools[0].type'),
    ({'tools': [TOOL, TOOL]}, 'tools[1].name'),
    ({'tools': [TOOL], 'tool_choice': {'type': 'tool', 'name': 'b'}}, 'tool_choice.name'),
    ({'tool_choice': {'type': 'any'}}, 'tool_choice'),
    ({'mcp_servers': []}, 'mcp_servers'),
    ({'n': 2}, 'n'),
]


async def test_errors_have_the_form_of_the_api(running: OpenAiGateway) -> None:
    """Errors have Anthropic's format and types, and name the parameter."""
    mismatches: list[Any] = []
    for fields, param in REFUSED:
        body = {'model': 'tiny', 'max_tokens': 5, 'messages': HELLO, **fields}
        response = await running.post('/messages', body)
        error = response.json()
        found = (response.status_code, error['type'], error['error']['type'], error['error']['param'])
        if found != (400, 'error', 'invalid_request_error', param):
            mismatches.append((fields, error))
    assert mismatches == []
    wrong = await running.post('/messages', {'model': 'other', 'max_tokens': 5, 'messages': HELLO})
    assert (wrong.status_code, wrong.json()['error']['type']) == (404, 'not_found_error')
    denied = await running.post('/messages', {}, key='tml-unknown')
    assert (denied.status_code, denied.json()['error']['type']) == (401, 'authentication_error')


async def test_error_in_a_stream_is_a_named_event(running: OpenAiGateway) -> None:
    """An error after the first event is the last event, with the name `error`."""
    engine = scripted(running, ('a',) * 100_000)
    body = {'model': 'tiny', 'max_tokens': 400, 'messages': HELLO, 'stream': True}
    async with (
        httpx.AsyncClient(timeout=60, headers=HEADERS) as client,
        client.stream('POST', f'{running.base_url}/messages', json=body) as response,
    ):
        lines: list[str] = []
        async for line in response.aiter_lines():
            lines.append(line)
            for request_id in engine.request_ids:
                await engine.abort(request_id)
    events = [line for line in lines if line.startswith('event: ')]
    assert (events[0], events[-1]) == ('event: message_start', 'event: error')
