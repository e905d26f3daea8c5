"""Chats between their messages and rows."""

import json
from collections.abc import Sequence
from typing import Any

from services.data.api.convert_fields import dict_from_struct, struct_of, value_from_proto, value_to_proto
from services.data.domain import Row
from services.kit.errors import InvalidField
from twinkle.api.data.v1 import message_pb2

_ROLES = {
    message_pb2.ROLE_SYSTEM: 'system',
    message_pb2.ROLE_USER: 'user',
    message_pb2.ROLE_ASSISTANT: 'assistant',
    message_pb2.ROLE_TOOL: 'tool',
}
_ROLE_NUMBERS = {name: number for number, name in _ROLES.items()}
_CHAT_COLUMNS = {'messages', 'tools', 'user_data'}
_TOKEN_COLUMNS = {'input_ids', 'labels', 'position_ids', 'loss_weights', 'completion_mask'}


def row_from_trajectory(trajectory: message_pb2.Trajectory, field: str) -> Row:
    """Return a chat as a row.

    Raises:
        InvalidField: names the part that no model could read.
    """
    if not trajectory.messages:
        raise InvalidField(f'{field}.messages', 'must have at least one message')
    messages = [
        _message_from_proto(message, f'{field}.messages[{index}]', index=index)
        for index, message in enumerate(trajectory.messages)
    ]
    row: Row = {'messages': messages}
    if trajectory.tools:
        row['tools'] = [_tool_from_proto(tool, f'{field}.tools[{i}]') for i, tool in enumerate(trajectory.tools)]
    if trajectory.user_data:
        pairs = sorted(trajectory.user_data.items())
        row['user_data'] = [[name, json.dumps(value_from_proto(value), ensure_ascii=False)] for name, value in pairs]
    return row


def trajectory_of_row(row: Row) -> message_pb2.Trajectory:
    """Return the chat a row was encoded from; its other columns are in `user_data`."""
    tools: list[dict[str, Any]] = row.get('tools') or []
    trajectory = message_pb2.Trajectory(
        messages=[_message_to_proto(message) for message in row.get('messages', [])],
        tools=[_tool_to_proto(tool) for tool in tools],
    )
    others = {name: value for name, value in row.items() if name not in _CHAT_COLUMNS | _TOKEN_COLUMNS}
    pairs: list[tuple[str, str]] = row.get('user_data') or []
    packed: Row = {name: json.loads(text) for name, text in pairs}
    for name, value in {**others, **packed}.items():
        trajectory.user_data[name].CopyFrom(value_to_proto(value))
    return trajectory


def _message_from_proto(message: message_pb2.Message, field: str, *, index: int) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidField(f'{field}.role', 'must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL')
    if role == 'system' and index:
        raise InvalidField(f'{field}.role', 'may be ROLE_SYSTEM only in the first message')
    if not message.parts and not message.tool_calls:
        raise InvalidField(f'{field}.parts', 'must have at least one part, unless the message calls tools')
    converted: dict[str, Any] = {'role': role, 'content': _text_from_parts(message.parts, f'{field}.parts')}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        converted['tool_calls'] = [_call_from_proto(call, f'{field}.tool_calls[{i}]') for i, call in calls]
    if message.tool_call_id:
        converted['tool_call_id'] = message.tool_call_id
    if message.reasoning_content:
        converted['reasoning_content'] = message.reasoning_content
    return converted


def _text_from_parts(parts: Sequence[message_pb2.ContentPart], field: str) -> str:
    for index, part in enumerate(parts):
        kind = part.WhichOneof('part')
        if kind != 'text':
            raise InvalidField(f'{field}[{index}]', f'must be text; {kind or "an empty part"} is not supported yet')
    return ''.join(part.text for part in parts)


def _call_from_proto(call: message_pb2.ToolCall, field: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidField(f'{field}.name', 'is missing')
    function = {'name': call.name, 'arguments': dict_from_struct(call.arguments)}
    return {'id': call.tool_call_id, 'type': 'function', 'function': function}


def _tool_from_proto(tool: message_pb2.Tool, field: str) -> dict[str, Any]:
    if not tool.name:
        raise InvalidField(f'{field}.name', 'is missing')
    parameters = dict_from_struct(tool.parameters)
    return {
        'type': 'function',
        'function': {'name': tool.name, 'description': tool.description, 'parameters': parameters},
    }


def _message_to_proto(message: dict[str, Any]) -> message_pb2.Message:
    calls: list[dict[str, Any]] = message.get('tool_calls') or []
    content: str = message.get('content') or ''
    return message_pb2.Message(
        role=_ROLE_NUMBERS[message['role']],
        parts=[message_pb2.ContentPart(text=content)] if content or not calls else [],
        tool_calls=[_call_to_proto(call) for call in calls],
        tool_call_id=message.get('tool_call_id') or '',
        reasoning_content=message.get('reasoning_content') or '',
    )


def _call_to_proto(call: dict[str, Any]) -> message_pb2.ToolCall:
    function = call['function']
    arguments = struct_of(function.get('arguments') or {})
    return message_pb2.ToolCall(tool_call_id=call.get('id') or '', name=function['name'], arguments=arguments)


def _tool_to_proto(tool: dict[str, Any]) -> message_pb2.Tool:
    function = tool['function']
    return message_pb2.Tool(
        name=function['name'],
        description=function.get('description') or '',
        parameters=struct_of(function.get('parameters') or {}),
    )
