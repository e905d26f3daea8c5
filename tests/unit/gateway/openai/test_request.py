"""Request bodies of the OpenAI API: each is parsed, or refused with an error that names the parameter."""

import itertools
import json
import random
from collections.abc import Callable
from typing import Any

import pytest

from twinkle_services.gateway.http.body import parse_object
from twinkle_services.gateway.http.call import event_bytes, json_bytes
from twinkle_services.gateway.openai.chat_request import chat_request
from twinkle_services.gateway.openai.errors import BLOCK_PARAMS, ITEM_PARAMS, OpenAiErrors
from twinkle_services.gateway.openai.request import completion_request
from twinkle_services.kit.errors import CheckpointDamaged, InvalidField

HELLO = {'role': 'user', 'content': 'Hi'}
VALUES: list[Any] = [
    None, True, False, 0, -1, 1.5, 10**400, -(10**400), 2**63, '', 'a', '\0', '\U0001f642', [], [[]], {}, {'a': {}},
    [None], [True], [-1], [2**31], [''], [{}], {'type': None}, {'': ''},
]  # fmt: skip
"""Values given to every parameter."""
COMPLETION_PARAMS = (
    'model', 'prompt', 'n', 'max_tokens', 'temperature', 'top_p', 'top_k', 'min_p', 'seed', 'stop', 'stop_token_ids',
    'logprobs', 'echo', 'best_of', 'stream', 'stream_options', 'response_format', 'metadata', 'user', 'suffix', 'x',
    'presence_penalty', 'frequency_penalty', 'repetition_penalty', 'min_tokens', 'ignore_eos', 'logit_bias', 'store',
)  # fmt: skip
CHAT_PARAMS = (
    'messages', 'max_completion_tokens', 'top_logprobs', 'chat_template_kwargs', 'tools', 'tool_choice', 'service_tier',
    'parallel_tool_calls', 'modalities', 'verbosity', 'prompt_cache_key', 'functions',
)  # fmt: skip


def error_body(error: InvalidField) -> dict[str, Any]:
    """Return the error that the client reads, which must be valid JSON."""
    return json.loads(json_bytes(OpenAiErrors().body_of(error, request_id='rq-1')))['error']


def refusal_of(read: Callable[[], Any]) -> dict[str, Any] | None:
    """Return the error that `read` raises; None if `read` succeeds."""
    try:
        read()
    except InvalidField as error:
        return error_body(error)
    return None


def test_every_parameter_accepts_or_refuses_every_value() -> None:
    """Every value of every parameter gives a valid request, or an error that names the parameter."""
    for name, value in itertools.product((*COMPLETION_PARAMS, *CHAT_PARAMS), VALUES):
        completion, chat = {'model': 'm', 'prompt': 'a', name: value}, {'model': 'm', 'messages': [HELLO], name: value}
        for read, body in ((completion_request, completion), (chat_request, chat)):
            refusal = refusal_of(lambda read=read, body=body: read(body).params.SerializeToString())
            if refusal is not None:
                assert refusal['param'].partition('.')[0].partition('[')[0] == name, (name, value)


def test_refusals_of_samplers_name_the_parameter_of_the_api() -> None:
    """The error for a field of the sampler contract names the parameter of the API that the client called."""
    fields = (
        'prompt.chat.trajectory.messages[1].content',
        'params.max_tokens',
        'params.stop_strings',
        'params.structured_output.json_schema',
    )

    def params_of(errors: OpenAiErrors) -> list[str]:
        bodies = [errors.body_of(InvalidField(field, 'is wrong'), request_id='rq-1') for field in fields]
        return [body['error']['param'] for body in bodies]

    assert params_of(OpenAiErrors()) == ['messages[1].content', 'max_tokens', 'stop', 'response_format']
    assert params_of(OpenAiErrors(ITEM_PARAMS)) == ['input', 'max_output_tokens', 'stop', 'text.format']
    assert params_of(OpenAiErrors(BLOCK_PARAMS)) == ['messages', 'max_tokens', 'stop_sequences', 'response_format']


def test_damaged_weights_are_not_a_server_error() -> None:
    """Damaged weights have a status below 500, because a repeated call cannot succeed either."""
    assert OpenAiErrors().status_of(CheckpointDamaged('run/weights/1')) == 400


def test_messages_of_any_shape_are_accepted_or_refused() -> None:
    """Random messages are valid, or are refused with a field name that begins with `messages`."""
    generator = random.Random(0)
    names = ('role', 'content', 'tool_calls', 'tool_call_id', 'reasoning_content', 'name', 'refusal')
    roles = ('user', 'assistant', 'tool', 'system')
    for _ in range(3000):
        message: Any = {name: generator.choice(VALUES) for name in generator.sample(names, 3)}
        if generator.random() < 0.8:
            message['role'] = generator.choice(roles)
        body = {'model': 'm', 'messages': [message]}
        refusal = refusal_of(lambda body=body: chat_request(body).prompts[0].SerializeToString())
        assert refusal is None or refusal['param'].startswith('messages')


@pytest.mark.parametrize('depth', [25, 400, 900])
def test_arguments_that_are_nested_too_deeply_are_refused(depth: int) -> None:
    """A tool call's arguments that are nested deeper than protobuf parsers accept are refused."""
    arguments = '{"a":' * depth + '1' + '}' * depth
    call = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': arguments}}
    with pytest.raises(InvalidField) as caught:
        chat_request({'model': 'm', 'messages': [{'role': 'assistant', 'tool_calls': [call]}]})
    assert caught.value.field == 'messages[0].tool_calls[0].function.arguments'


def test_arguments_of_the_maximum_depth_are_accepted() -> None:
    """Arguments of the maximum depth are unchanged by serialization and parsing."""
    arguments = '{"a":' * 24 + '1' + '}' * 24
    call = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': arguments}}
    request = chat_request({'model': 'm', 'messages': [{'role': 'assistant', 'tool_calls': [call]}]})
    (prompt,) = request.prompts
    assert type(prompt).FromString(prompt.SerializeToString()) == prompt


def test_schema_that_is_too_long_is_refused() -> None:
    """A schema is limited in size, because each prompt is sampled with a copy of the schema."""
    schema = {'type': 'object', 'description': 'x' * 70_000}
    form = {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': schema}}
    with pytest.raises(InvalidField) as caught:
        completion_request({'model': 'm', 'prompt': ['a'] * 200, 'response_format': form})
    assert caught.value.field == 'response_format.json_schema.schema'


def test_name_with_an_unpaired_surrogate_is_encodable() -> None:
    """An error response that repeats a name with an unpaired surrogate can be encoded."""
    with pytest.raises(InvalidField) as caught:
        parse_object(b'{"\\ud800": 1, "\\ud800": 2}')
    assert error_body(caught.value)['reason'] == 'INVALID_FIELD'


@pytest.mark.parametrize('text', ['a\nb\r\nc', 'a\u2028b\u2029c\u0085d', '\x0b\x0c\x1c\x1d\x1e', '\U0001f642ä\0'])
def test_event_is_one_line_for_every_reader(text: str) -> None:
    """A server-sent event is one line, even for readers that split at Unicode line separators, and keeps its text."""
    event = event_bytes({'text': text}).decode()
    assert event.endswith('\n\n')
    (line, empty) = event.splitlines()
    assert (json.loads(line.removeprefix('data: ')), empty) == ({'text': text}, '')


def test_random_bytes_are_refused_or_read() -> None:
    """Bytes that are not a JSON object raise InvalidField and no other error."""
    generator = random.Random(1)
    for _ in range(2000):
        data = bytes(generator.choices(b'{}[]":,\\u0123456789abcdefNaI-+.e \xff\x00', k=generator.randrange(40)))
        refusal = refusal_of(lambda data=data: parse_object(data))
        assert refusal is None or refusal['reason'] == 'INVALID_FIELD'


def test_integers_beyond_floating_point_are_refused() -> None:
    """An integer beyond the range of 64-bit floating-point numbers is refused in a schema and in arguments."""
    huge = 10**400
    form = {'type': 'json_schema', 'json_schema': {'name': 'n', 'schema': {'maximum': huge}}}
    call = {'id': 'c', 'type': 'function', 'function': {'name': 'f', 'arguments': f'{{"a":{huge}}}'}}
    with pytest.raises(InvalidField):
        completion_request({'model': 'm', 'prompt': 'a', 'response_format': form})
    with pytest.raises(InvalidField):
        chat_request({'model': 'm', 'messages': [{'role': 'assistant', 'tool_calls': [call]}]})
