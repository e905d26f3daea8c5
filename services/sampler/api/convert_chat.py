"""Chats as the templates of the component library take them."""

from typing import Any, cast

from google.protobuf import json_format, struct_pb2

from services.kit.errors import InvalidField
from twinkle.api.data.v1 import message_pb2
from twinkle.data_format import Trajectory

_ROLES = {
    message_pb2.ROLE_SYSTEM: 'system',
    message_pb2.ROLE_USER: 'user',
    message_pb2.ROLE_ASSISTANT: 'assistant',
    message_pb2.ROLE_TOOL: 'tool',
}


def trajectory_from_proto(message: message_pb2.Trajectory, field: str) -> Trajectory:
    """Return a chat; what a template has to say of it is checked when it is encoded.

    Args:
        message: the chat.
        field: its path in the request, for errors.

    Raises:
        InvalidField: there are no messages, a role is unset, or media are given.
    """
    if not message.messages:
        raise InvalidField(f'{field}.messages', 'is empty; give at least one message')
    messages = [_turn(turn, f'{field}.messages[{index}]') for index, turn in enumerate(message.messages)]
    return cast('Trajectory', {'messages': messages, 'tools': [_tool(tool) for tool in message.tools]})


def _turn(message: message_pb2.Message, field: str) -> dict[str, Any]:
    if message.role not in _ROLES:
        raise InvalidField(f'{field}.role', 'must be system, user, assistant or tool')
    texts = [_text(part, f'{field}.parts[{index}]') for index, part in enumerate(message.parts)]
    turn: dict[str, Any] = {'role': _ROLES[message.role], 'content': ''.join(texts)}
    if not texts and not message.tool_calls:
        raise InvalidField(f'{field}.parts', 'is empty; only a message with tool_calls may have none')
    if message.tool_calls:
        turn['tool_calls'] = [_call(call) for call in message.tool_calls]
    if message.tool_call_id:
        turn['tool_call_id'] = message.tool_call_id
    if message.reasoning_content:
        turn['reasoning_content'] = message.reasoning_content
    return turn


def _text(part: message_pb2.ContentPart, field: str) -> str:
    kind = part.WhichOneof('part')
    if kind != 'text':
        raise InvalidField(field, f'must be text, got {kind or "nothing"}; media are not supported yet')
    return part.text


def _call(call: message_pb2.ToolCall) -> dict[str, Any]:
    function = {'name': call.name, 'arguments': _struct(call.arguments)}
    return {'id': call.tool_call_id, 'type': 'function', 'function': function}


def _tool(tool: message_pb2.Tool) -> dict[str, Any]:
    function = {'name': tool.name, 'description': tool.description, 'parameters': _struct(tool.parameters)}
    return {'type': 'function', 'function': function}


def _struct(struct: struct_pb2.Struct) -> Any:
    return _whole(json_format.MessageToDict(struct))


def _whole(value: Any) -> Any:
    """Return whole numbers as integers: a Struct knows floats only, and templates print what they get."""
    if isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, dict):
        return {name: _whole(item) for name, item in cast('dict[str, Any]', value).items()}
    if isinstance(value, list):
        return [_whole(item) for item in cast('list[Any]', value)]
    return value
