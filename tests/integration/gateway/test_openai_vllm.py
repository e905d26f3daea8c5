"""Tests of constrained tool calls over the OpenAI API with vLLM: a tiny random model and the built-in model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
import pytest_asyncio

from fixtures.chat_templates import HERMES, THINKING
from fixtures.openai_gateway import OpenAiGateway, openai_gateway
from fixtures.sampler_engines import make_vllm_engine
from fixtures.tiny_model import build_tiny_model
from twinkle.hub import get_model

pytestmark = [pytest.mark.asyncio(loop_scope='module'), pytest.mark.timeout(600), pytest.mark.slow]

ASK: list[Any] = [{'role': 'user', 'content': 'Paint it.'}]
PAINT: dict[str, Any] = {
    'type': 'function',
    'function': {
        'name': 'paint',
        'description': 'Paint a wall',
        'parameters': {
            'type': 'object',
            'properties': {
                'colour': {'$ref': '#/$defs/Colour'},
                'coats': {'enum': [1, 2, 3]},
                'is_matt': {'type': 'boolean'},
            },
            'required': ['colour', 'coats', 'is_matt'],
            'additionalProperties': False,
            '$defs': {'Colour': {'enum': ['red', 'green', 'blue']}},
        },
    },
}
CONTEXT_TOKENS = 2048
"""Context length of the model. It is long because tokens are bytes, and schemas of tools are long."""
WAIT: dict[str, Any] = {'type': 'function', 'function': {'name': 'wait'}}


@pytest_asyncio.fixture(scope='module', loop_scope='module')
async def running(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[OpenAiGateway]:
    """A gateway with vLLM and a tiny model whose chat template renders tools."""
    folder = build_tiny_model(tmp_path_factory.mktemp('model'))
    (folder / 'chat_template.jinja').write_text(THINKING)
    config = json.loads((folder / 'config.json').read_text())
    (folder / 'config.json').write_text(json.dumps({**config, 'max_position_embeddings': CONTEXT_TOKENS}))
    engine: Any = await make_vllm_engine(
        folder,
        max_model_len=CONTEXT_TOKENS,
        max_num_batched_tokens=8 * CONTEXT_TOKENS,
        # Schemas allow any number of spaces by default, and a random model samples many spaces.
        structured_outputs_config={'disable_any_whitespace': True},
    )
    try:
        async with openai_gateway(tmp_path_factory.mktemp('state'), engine) as gateway:
            yield gateway
    finally:
        await engine.close()


def check_paint(call: Any) -> None:
    """Check a call against the schema of its function."""
    arguments = json.loads(call.function.arguments)
    assert call.function.name == 'paint'
    assert set(arguments) == {'colour', 'coats', 'is_matt'}
    assert arguments['colour'] in {'red', 'green', 'blue'}
    assert arguments['coats'] in {1, 2, 3}
    assert arguments['is_matt'] in {True, False}


async def ask(running: OpenAiGateway, **fields: Any) -> Any:
    """Return a response to a question with tools."""
    client = running.client()
    return await client.chat.completions.create(model='tiny', messages=ASK, max_tokens=400, **fields)


async def test_named_function_is_called_with_valid_arguments(running: OpenAiGateway) -> None:
    """A named function is called once in each choice, with arguments that satisfy its schema, complete or streamed."""
    fields: dict[str, Any] = {
        'tools': [PAINT, WAIT],
        'tool_choice': {'type': 'function', 'function': {'name': 'paint'}},
        'n': 4,
        'seed': 1,
    }
    response = await ask(running, **fields)
    assert [choice.finish_reason for choice in response.choices] == ['tool_calls'] * 4
    for choice in response.choices:
        (call,) = choice.message.tool_calls
        check_paint(call)
    calls = [
        call
        async for chunk in await ask(running, **fields, stream=True)
        for choice in chunk.choices
        for call in choice.delta.tool_calls or []
    ]
    assert len(calls) == 4
    for call in calls:
        check_paint(call)


async def test_required_calls_are_calls_of_the_tools(running: OpenAiGateway) -> None:
    """A required choice gives at least one call, only of the offered tools, even without parallel calls."""
    for is_parallel in (True, False):
        response = await ask(
            running, tools=[PAINT, WAIT], tool_choice='required', parallel_tool_calls=is_parallel, n=4, seed=2
        )
        counts = [len(choice.message.tool_calls or []) for choice in response.choices]
        assert max(counts) > 1 if is_parallel else set(counts) == {1}
        calls = [call for choice in response.choices for call in choice.message.tool_calls or []]
        for call in calls:
            if call.function.name == 'paint':
                check_paint(call)
            else:
                assert (call.function.name, call.function.arguments) == ('wait', '{}')


async def test_schema_that_is_not_enforced_is_refused(running: OpenAiGateway) -> None:
    """The error for a keyword that the engine does not enforce names the field and a solution."""
    parameters = {'type': 'object', 'properties': {'a': {'type': 'integer', 'multipleOf': 7}}}
    tool: Any = {'type': 'function', 'function': {'name': 'odd', 'parameters': parameters}}
    with pytest.raises(openai.BadRequestError) as raised:
        await ask(running, tools=[tool], tool_choice='required')
    assert raised.value.param == 'tools'
    assert 'multipleOf' in raised.value.message
    assert '"tool_choice": "auto"' in raised.value.message


async def test_prefix_of_a_repeated_chat_is_cached(running: OpenAiGateway) -> None:
    """The usage of a repeated chat reports the tokens that are in the prefix cache."""
    responses = [await ask(running, tools=[PAINT], tool_choice='auto', seed=3) for _ in range(2)]
    first, second = (response.usage.prompt_tokens_details.cached_tokens for response in responses)
    assert 0 <= first < second <= responses[1].usage.prompt_tokens


QUESTIONS = {
    'What is the weather in Paris in celsius?': ('get_weather', {'city': 'Paris', 'unit': 'celsius'}),
    'What is 12 + 30?': ('add', {'a': 12, 'b': 30}),
}
"""Questions, each with the call that answers it."""
SCHEMAS: dict[str, Any] = {
    'get_weather': {'city': {'type': 'string'}, 'unit': {'enum': ['celsius', 'fahrenheit']}},
    'add': {'a': {'type': 'integer'}, 'b': {'type': 'integer'}},
}


def link_model(folder: Path) -> None:
    """Make a folder of the built-in model with another chat template."""
    for file in Path(get_model('smollm2-135m-instruct')).iterdir():
        if file.name != 'chat_template.jinja':
            (folder / file.name).symlink_to(file)
    (folder / 'chat_template.jinja').write_text(HERMES)


async def test_built_in_model_answers_with_the_right_calls(tmp_path: Path) -> None:
    """The built-in model, which would otherwise answer with text, is constrained to calls with the right arguments."""
    folder = tmp_path / 'model'
    folder.mkdir()
    link_model(folder)
    tools: list[Any] = [
        {
            'type': 'function',
            'function': {
                'name': name,
                'parameters': {'type': 'object', 'properties': properties, 'required': list(properties)},
            },
        }
        for name, properties in SCHEMAS.items()
    ]
    engine: Any = await make_vllm_engine(
        folder, max_model_len=CONTEXT_TOKENS, max_num_batched_tokens=2 * CONTEXT_TOKENS, kv_cache_memory_bytes=256 << 20
    )
    try:
        async with openai_gateway(tmp_path, engine) as running:
            for question, expected in QUESTIONS.items():
                response = await running.client().chat.completions.create(
                    model='tiny',
                    messages=[{'role': 'user', 'content': question}],
                    tools=tools,
                    tool_choice='required',
                    parallel_tool_calls=False,
                    temperature=0,
                )
                (call,) = response.choices[0].message.tool_calls or []
                assert (call.function.name, json.loads(call.function.arguments)) == expected
    finally:
        await engine.close()
