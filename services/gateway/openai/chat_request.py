"""The request of `/v1/chat/completions`: messages, and the parameters that only chats have."""

from collections.abc import Mapping
from typing import Any

from services.gateway.http.body import parse_object
from services.gateway.http.fields import Check, flag, is_shallow, items, mapping, read_fields, text, whole
from services.gateway.openai.asked import (
    MAX_TOKENS,
    MAX_TOP_LOGPROBS,
    SHARED_CHECKS,
    SHARED_REFUSED,
    Asked,
    make_asked,
)
from services.kit.errors import InvalidField
from services.kit.rpc.structs import struct_of
from twinkle.api.data.v1 import message_pb2
from twinkle.api.sampler.v1 import sampling_pb2

_ROLES = {
    'system': message_pb2.ROLE_SYSTEM,
    'developer': message_pb2.ROLE_SYSTEM,
    'user': message_pb2.ROLE_USER,
    'assistant': message_pb2.ROLE_ASSISTANT,
    'tool': message_pb2.ROLE_TOOL,
}
_CHECKS: Mapping[str, Check] = {
    **SHARED_CHECKS,
    'messages': items,
    'max_tokens': whole(1, MAX_TOKENS),
    'max_completion_tokens': whole(1, MAX_TOKENS),
    'logprobs': flag,
    'top_logprobs': whole(0, MAX_TOP_LOGPROBS),
    'chat_template_kwargs': mapping,
}
_MAX_ARGUMENTS_DEPTH = 24
"""A message nests three levels for each of an argument, and its readers stop at a hundred."""
_NO_TOOLS = 'is not supported; what a model writes comes back as text'
_REFUSED: Mapping[str, str] = {
    **SHARED_REFUSED,
    **dict.fromkeys(('tools', 'tool_choice', 'parallel_tool_calls', 'functions', 'function_call'), _NO_TOOLS),
    **dict.fromkeys(('audio', 'modalities', 'prediction', 'web_search_options'), 'is not supported'),
    'reasoning_effort': 'is not supported; see chat_template_kwargs.enable_thinking',
    'verbosity': 'is not supported',
}


def chat_asked(body: Mapping[str, Any]) -> Asked:
    """Return what a chat asks for.

    Raises:
        InvalidField: names the parameter.
    """
    values = read_fields(body, _CHECKS, _REFUSED)
    if 'max_completion_tokens' in values:
        if values.get('max_tokens', values['max_completion_tokens']) != values['max_completion_tokens']:
            raise InvalidField('max_tokens', 'differs from max_completion_tokens; give one of them')
        values['max_tokens'] = values['max_completion_tokens']
    if 'top_logprobs' in values and not values.get('logprobs'):
        raise InvalidField('top_logprobs', 'goes with "logprobs": true only')
    top_logprobs = values.get('top_logprobs', 0) if values.get('logprobs') else None
    return make_asked(values, (_prompt_of(values),), top_logprobs=top_logprobs)


def _prompt_of(values: Mapping[str, Any]) -> sampling_pb2.Prompt:
    if not values.get('messages'):
        raise InvalidField('messages', 'must have at least one message')
    messages = [_message(message, f'messages[{place}]') for place, message in enumerate(values['messages'])]
    for place, message in enumerate(messages):
        if place and message.role == message_pb2.ROLE_SYSTEM:
            raise InvalidField(f'messages[{place}].role', 'may be system or developer in the first message only')
    chat = sampling_pb2.ChatPrompt(trajectory=message_pb2.Trajectory(messages=messages))
    field = 'chat_template_kwargs'
    options = read_fields(
        {f'{field}.{name}': option for name, option in values.get(field, {}).items()},
        {f'{field}.enable_thinking': flag},
        {},
    )
    if options:
        chat.is_thinking_enabled = options[f'{field}.enable_thinking']
    return sampling_pb2.Prompt(chat=chat)


def _message(value: Any, field: str) -> message_pb2.Message:
    given = {name: item for name, item in mapping(value, field).items() if item is not None}
    for name in given.keys() - {'role', 'content', 'tool_calls', 'tool_call_id', 'reasoning_content'}:
        raise InvalidField(f'{field}.{name[:100]}', 'is not supported')
    role = given.get('role')
    if not isinstance(role, str) or role not in _ROLES:
        raise InvalidField(f'{field}.role', f'must be one of {", ".join(_ROLES)}')
    for name, owner in (('tool_calls', 'assistant'), ('reasoning_content', 'assistant'), ('tool_call_id', 'tool')):
        if name in given and role != owner:
            raise InvalidField(f'{field}.{name}', f'belongs to messages of the role {owner}')
    calls = items(given.get('tool_calls', []), f'{field}.tool_calls')
    if 'content' not in given and not calls:
        raise InvalidField(f'{field}.content', 'is required')
    return message_pb2.Message(
        role=_ROLES[role],
        parts=_parts(given['content'], f'{field}.content') if 'content' in given else [],
        tool_calls=[_tool_call(call, f'{field}.tool_calls[{place}]') for place, call in enumerate(calls)],
        tool_call_id=text(given.get('tool_call_id', ''), f'{field}.tool_call_id'),
        reasoning_content=text(given.get('reasoning_content', ''), f'{field}.reasoning_content'),
    )


def _parts(content: Any, field: str) -> list[message_pb2.ContentPart]:
    if isinstance(content, str):
        return [message_pb2.ContentPart(text=content)]
    if not isinstance(content, list) or not content:
        raise InvalidField(field, 'must be a string or a list of text parts')
    return [_part(part, f'{field}[{place}]') for place, part in enumerate(items(content, field))]


def _part(value: Any, field: str) -> message_pb2.ContentPart:
    part = mapping(value, field)
    if part.get('type') != 'text':
        raise InvalidField(f'{field}.type', 'must be "text"; pictures, sounds and files are not supported')
    for name in part.keys() - {'type', 'text'}:
        raise InvalidField(f'{field}.{name[:100]}', 'is not supported')
    return message_pb2.ContentPart(text=text(part.get('text'), f'{field}.text'))


def _tool_call(value: Any, field: str) -> message_pb2.ToolCall:
    call = mapping(value, field)
    for name in call.keys() - {'id', 'type', 'function'}:
        raise InvalidField(f'{field}.{name[:100]}', 'is not supported')
    if call.get('type', 'function') != 'function':
        raise InvalidField(f'{field}.type', 'must be "function"')
    function = mapping(call.get('function'), f'{field}.function')
    for name in function.keys() - {'name', 'arguments'}:
        raise InvalidField(f'{field}.function.{name[:100]}', 'is not supported')
    arguments = text(function.get('arguments', '{}'), f'{field}.function.arguments')
    try:
        parsed = parse_object(arguments.encode())
    except InvalidField as error:
        raise InvalidField(f'{field}.function.arguments', 'must be a string of a JSON object') from error
    if not is_shallow(parsed, _MAX_ARGUMENTS_DEPTH):
        raise InvalidField(f'{field}.function.arguments', f'is nested deeper than {_MAX_ARGUMENTS_DEPTH}')
    return message_pb2.ToolCall(
        tool_call_id=text(call.get('id', ''), f'{field}.id'),
        name=text(function.get('name'), f'{field}.function.name'),
        arguments=struct_of(parsed),
    )
