"""Conversion of chats between protobuf messages and the dictionaries of the component library's templates.

The data service and the sampler share these checks, so that they accept the same chats.
"""

from collections.abc import Sequence
from typing import Any

from twinkle.api.data.v1 import message_pb2
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.json_values import dict_from_struct, struct_of

_ROLES = {
    message_pb2.ROLE_SYSTEM: 'system',
    message_pb2.ROLE_USER: 'user',
    message_pb2.ROLE_ASSISTANT: 'assistant',
    message_pb2.ROLE_TOOL: 'tool',
}
_ROLE_NUMBERS = {name: number for number, name in _ROLES.items()}


def chat_from_proto(trajectory: message_pb2.Trajectory, field: str) -> dict[str, Any]:
    """Return a dictionary with the chat's `messages` and, if it has any, its `tools`.

    Args:
        trajectory: Message to convert.
        field: Path of the message in the request, for errors.

    Raises:
        InvalidField: A part of the chat is invalid.
    """
    if not trajectory.messages:
        raise InvalidField(f'{field}.messages', 'must have at least one message')
    turns = enumerate(trajectory.messages)
    chat: dict[str, Any] = {
        'messages': [_turn_from_proto(turn, f'{field}.messages[{index}]', index=index) for index, turn in turns]
    }
    if trajectory.tools:
        tools = enumerate(trajectory.tools)
        chat['tools'] = [_tool_from_proto(tool, f'{field}.tools[{index}]') for index, tool in tools]
    return chat


def chat_to_proto(messages: Sequence[dict[str, Any]], tools: Sequence[dict[str, Any]] = ()) -> message_pb2.Trajectory:
    """Return the message of a chat. The arguments have the form of the values that `chat_from_proto` returns."""
    return message_pb2.Trajectory(
        messages=[_turn_to_proto(message) for message in messages], tools=[_tool_to_proto(tool) for tool in tools]
    )


def _turn_from_proto(message: message_pb2.Message, field: str, *, index: int) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        raise InvalidField(f'{field}.role', 'must be ROLE_SYSTEM, ROLE_USER, ROLE_ASSISTANT or ROLE_TOOL')
    if role == 'system' and index:
        raise InvalidField(f'{field}.role', 'may be ROLE_SYSTEM only in the first message')
    if not message.parts and not message.tool_calls:
        raise InvalidField(f'{field}.parts', 'must have at least one part, unless the message calls tools')
    turn: dict[str, Any] = {'role': role, 'content': _text_from_parts(message.parts, f'{field}.parts')}
    if message.tool_calls:
        calls = enumerate(message.tool_calls)
        turn['tool_calls'] = [_call_from_proto(call, f'{field}.tool_calls[{position}]') for position, call in calls]
    if message.tool_call_id:
        turn['tool_call_id'] = message.tool_call_id
    if message.reasoning_content:
        turn['reasoning_content'] = message.reasoning_content
    return turn


def _text_from_parts(parts: Sequence[message_pb2.ContentPart], field: str) -> str:
    for index, part in enumerate(parts):
        kind = part.WhichOneof('part')
        if kind != 'text':
            raise InvalidField(f'{field}[{index}]', f'must be text; {kind or "an empty part"} is not supported yet')
    return ''.join(part.text for part in parts)


def _call_from_proto(call: message_pb2.ToolCall, field: str) -> dict[str, Any]:
    if not call.name:
        raise InvalidField(f'{field}.name', 'must be set')
    function = {'name': call.name, 'arguments': dict_from_struct(call.arguments)}
    return {'id': call.tool_call_id, 'type': 'function', 'function': function}


def _tool_from_proto(tool: message_pb2.Tool, field: str) -> dict[str, Any]:
    if not tool.name:
        raise InvalidField(f'{field}.name', 'must be set')
    function = {'name': tool.name, 'description': tool.description, 'parameters': dict_from_struct(tool.parameters)}
    return {'type': 'function', 'function': function}


def _turn_to_proto(message: dict[str, Any]) -> message_pb2.Message:
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
