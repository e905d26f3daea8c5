"""Tests of `/v1/responses` with OpenAI's SDK; the engine samples predefined pieces of text."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.openai_tools import CALL, last_chat, scripted
from fixtures.scripted_engine import ScriptedEngine
from twinkle_services.gateway.openai.responses_request import MAX_REPEATED_BYTES

TOOL: dict[str, Any] = {
    'type': 'function',
    'name': 'get_weather',
    'description': 'Current weather',
    'parameters': {'type': 'object', 'properties': {'city': {'type': 'string'}}},
    'strict': True,
}


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with a scripted engine."""
    async with openai_gateway(tmp_path, ScriptedEngine()) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


async def respond(running: OpenAiGateway, **fields: Any) -> Any:
    """Return the response to an input."""
    return await running.client().responses.create(model='tiny', **{'input': 'Hi', **fields})


async def events_of(running: OpenAiGateway, **fields: Any) -> list[Any]:
    """Return the events of a streamed response."""
    return [event async for event in await respond(running, stream=True, **fields)]


async def test_text_becomes_a_message(running: OpenAiGateway) -> None:
    """A string becomes one message with usage and versions; instructions become the system message."""
    engine = scripted(running, ('Hello', ' you'))
    response = await respond(running, instructions='Be short', temperature=0.5, metadata={'a': 'b'})
    assert (response.output_text, response.status, response.object) == ('Hello you', 'completed', 'response')
    assert [(item.type, item.role, item.status) for item in response.output] == [('message', 'assistant', 'completed')]
    assert (response.usage.output_tokens, response.usage.input_tokens_details.cached_tokens) == (2, 0)
    assert (response.temperature, response.instructions, response.metadata) == (0.5, 'Be short', {'a': 'b'})
    assert response.model_extra['twinkle']['base_model'] == 'tiny'
    turns = last_chat(engine)['messages']
    assert [(turn['role'], turn['content']) for turn in turns] == [('system', 'Be short'), ('user', 'Hi')]


async def test_limit_gives_an_incomplete_response(running: OpenAiGateway) -> None:
    """A response that reaches its limit is incomplete, streamed or not."""
    scripted(running, ('a', 'b', 'c'))
    response = await respond(running, max_output_tokens=2)
    assert (response.status, response.incomplete_details.reason) == ('incomplete', 'max_output_tokens')
    assert (response.output_text, response.output[0].status) == ('ab', 'incomplete')
    events = await events_of(running, max_output_tokens=2)
    assert events[-1].type == 'response.incomplete'


async def test_calls_and_their_results_are_items(running: OpenAiGateway) -> None:
    """A call is an item; a response's output and the result of its call form the next input."""
    engine = scripted(running, ('I look.\n', CALL, '\n', CALL))
    ignored: dict[str, Any] = {'include': ['reasoning.encrypted_content'], 'reasoning': {'summary': 'auto'}}
    first = await respond(running, tools=[TOOL], store=False, **ignored)
    assert [item.type for item in first.output] == ['message', 'function_call', 'function_call']
    call = first.output[1]
    assert (call.name, json.loads(call.arguments)) == ('get_weather', {'city': 'Paris', 'days': 2})
    assert last_chat(engine)['tools'][0]['function']['name'] == 'get_weather'
    scripted(running, ('It is warm.',))
    results = [{'type': 'function_call_output', 'call_id': item.call_id, 'output': 'warm'} for item in first.output[1:]]
    question: dict[str, Any] = {'role': 'user', 'content': [{'type': 'input_text', 'text': 'Warm?'}]}
    second = await respond(running, input=[question, *first.output, *results], tools=[TOOL])
    assert second.output_text == 'It is warm.'
    turns = last_chat(engine)['messages']
    assert [turn['role'] for turn in turns] == ['user', 'assistant', 'tool', 'tool']
    assert (turns[1]['content'], len(turns[1]['tool_calls'])) == ('I look.', 2)
    assert turns[3]['tool_call_id'] == first.output[2].call_id


async def test_events_build_the_complete_response(running: OpenAiGateway) -> None:
    """The SDK's accumulator and the last event have the same output as a complete response."""
    scripted(running, ('I ', 'look.', CALL, 'Then', ' more'))
    whole = await respond(running, tools=[TOOL])
    assert [item.type for item in whole.output] == ['message', 'function_call', 'message']
    events = await events_of(running, tools=[TOOL])
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        'response.created',
        'response.in_progress',
        'response.output_item.added',
        'response.content_part.added',
    ]
    assert kinds[-1] == 'response.completed'
    assert [event.sequence_number for event in events] == list(range(len(events)))
    done = [event.item for event in events if event.type == 'response.output_item.done']
    assert [item.id for item in done] == [item.id for item in events[-1].response.output]
    texts = [item.content[0].text for item in done if item.type == 'message']
    assert (
        texts == ['I look.', 'Then more'] == [item.content[0].text for item in whole.output if item.type == 'message']
    )
    assert ''.join(event.delta for event in events if event.type == 'response.output_text.delta') == 'I look.Then more'
    async with running.client().responses.stream(model='tiny', input='Hi', tools=[TOOL]) as stream:
        final = await stream.get_final_response()
    assert [item.type for item in final.output] == ['message', 'function_call', 'message']


class Answer(BaseModel):
    """A parsed answer."""

    is_warm: bool


async def test_formats_and_required_calls_are_constrained(running: OpenAiGateway) -> None:
    """A text format and a required function constrain the completion."""
    engine = scripted(running, ('{"is_warm": true}',))
    parsed = await running.client().responses.parse(model='tiny', input='Hi', text_format=Answer)
    assert parsed.output_parsed == Answer(is_warm=True)
    form = engine.forms[-1]
    assert form is not None
    assert form.json_schema is not None
    assert 'is_warm' in form.json_schema['properties']
    scripted(running, ('{"name": "get_weather", "parameters": {}}',))
    response = await respond(running, tools=[TOOL], tool_choice={'type': 'function', 'name': 'get_weather'})
    assert [(item.type, item.arguments) for item in response.output] == [('function_call', '{}')]


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({'input': None}, 'input'),
    ({'input': []}, 'input'),
    ({'input': [3]}, 'input[0]'),
    ({'input': [{'type': 'item_reference', 'id': 'a'}]}, 'input[0].type'),
    ({'input': [{'role': 'user'}]}, 'input[0].content'),
    ({'input': [{'role': 'user', 'content': [{'type': 'input_image', 'image_url': 'x'}]}]}, 'input[0].content[0].type'),
    ({'input': [{'role': 'user', 'content': 'a'}, {'role': 'system', 'content': 'b'}]}, 'input[1].role'),
    ({'input': [{'type': 'function_call', 'call_id': 'a', 'name': 'b', 'arguments': '{'}]}, 'input[0].arguments'),
    ({'input': [{'type': 'function_call_output', 'output': 'a'}]}, 'input[0].call_id'),
    ({'previous_response_id': 'resp-1'}, 'previous_response_id'),
    ({'conversation': 'c'}, 'conversation'),
    ({'store': True}, 'store'),
    ({'background': True}, 'background'),
    ({'truncation': 'auto'}, 'truncation'),
    ({'include': ['file_search_call.results']}, 'include[0]'),
    ({'reasoning': {'effort': 'low'}}, 'reasoning.effort'),
    ({'reasoning': {'summary': 'none'}}, 'reasoning.summary'),
    ({'tools': [{'type': 'web_search'}]}, 'tools[0].type'),
    ({'tools': [TOOL, TOOL]}, 'tools[1].name'),
    ({'tools': [TOOL], 'tool_choice': {'type': 'function', 'name': 'b'}}, 'tool_choice.name'),
    ({'tools': [TOOL], 'text': {'format': {'type': 'json_object'}}}, 'text.format'),
    ({'text': {'format': {'type': 'json_schema', 'name': 'a'}}}, 'text.format.schema'),
    ({'text': {'format': {'type': 'text', 'description': [[]]}}}, 'text.format.description'),
    ({'tools': [{**TOOL, 'description': 'a' * MAX_REPEATED_BYTES}], 'tool_choice': 'none'}, 'tools'),
    ({'metadata': {'a': 'a' * MAX_REPEATED_BYTES}}, 'metadata'),
    ({'max_output_tokens': 0}, 'max_output_tokens'),
    ({'messages': []}, 'messages'),
]


async def test_unsupported_parameters_are_named(running: OpenAiGateway) -> None:
    """The error for a wrong or unsupported parameter names it and, for stored responses, the alternative."""
    mismatches: list[Any] = []
    for fields, param in REFUSED:
        response = await running.post('/responses', {'model': 'tiny', 'input': 'Hi', **fields})
        error = response.json()['error']
        if (response.status_code, error['param'], error['reason']) != (400, param, 'INVALID_FIELD'):
            mismatches.append((fields, response.status_code, error))
    assert mismatches == []
    with pytest.raises(openai.BadRequestError, match='send all items of the conversation as input'):
        await respond(running, previous_response_id='resp-1', stream=True)
    with pytest.raises(openai.NotFoundError):
        await running.client().responses.create(model='other', input='Hi', stream=True)


async def test_error_in_a_stream_is_raised_by_the_sdk(running: OpenAiGateway) -> None:
    """An error after the first event of a stream raises an APIError with the reason, because its event has no name."""
    engine = scripted(running, ('a',) * 100_000)
    received: list[str] = []

    async def read() -> None:
        async for event in await respond(running, stream=True, max_output_tokens=400):
            received.append(event.type)
            for request_id in engine.request_ids:
                await engine.abort(request_id)

    with pytest.raises(openai.APIError) as raised:
        await read()
    assert received[0] == 'response.created'
    assert isinstance(raised.value.body, dict)
    assert raised.value.body['reason']
