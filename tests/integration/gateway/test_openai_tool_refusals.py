"""Tests of tool parameters of the OpenAI API: values without effect are accepted, and errors name wrong parameters."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.openai_tools import ASK, CALL, CLOCK, ask, scripted
from fixtures.scripted_engine import ScriptedEngine


@pytest.fixture
async def running(tmp_path: Path) -> AsyncIterator[OpenAiGateway]:
    """A gateway with a scripted engine."""
    async with openai_gateway(tmp_path, ScriptedEngine()) as gateway:
        yield gateway
        assert gateway.engine.load.running_sequences == 0


async def test_values_that_clients_always_send_are_accepted(running: OpenAiGateway) -> None:
    """Default values, and tool choices that require no call, are accepted without tools."""
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


async def test_errors_name_wrong_tool_parameters(running: OpenAiGateway) -> None:
    """A wrong or unsupported tool parameter is refused with status 400 and its name, before any sampling."""
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
    """A schema that is too deep is refused; a large schema is refused only if it must be enforced."""
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
    """An engine without structured output serves the choice `auto`; for a required call, the error names a solution."""
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
    """A base model whose chat template does not render tools refuses tools, but accepts the choice `none`."""
    async with openai_gateway(tmp_path, ScriptedEngine(tool_call_format='')) as running:
        scripted(running, ('Hi',))
        with pytest.raises(openai.BadRequestError) as raised:
            await ask(running)
        assert (raised.value.param, "'tiny'" in raised.value.message) == ('tools', True)
        assert (await ask(running, tool_choice='none')).choices[0].message.content == 'Hi'
