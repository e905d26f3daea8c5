"""Conversion of chats."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from google.protobuf import json_format, struct_pb2

from twinkle.api.data.v1 import message_pb2 as pb
from twinkle.data_format import Message, Tool, ToolCall, Trajectory, pack_user_data, user_data_values
from twinkle_client.convert.config import plain_value, struct

_ROLES: dict[str, pb.Role.ValueType] = {
    'system': pb.ROLE_SYSTEM,
    'user': pb.ROLE_USER,
    'assistant': pb.ROLE_ASSISTANT,
    'tool': pb.ROLE_TOOL,
}
_ROLE_NAMES = {number: name for name, number in _ROLES.items()}
_MEDIA = ('image', 'video', 'audio')


def trajectory_to_proto(trajectory: Mapping[str, Any]) -> pb.Trajectory:
    """Return the protobuf message of a chat.

    Args:
        trajectory: Mapping with `messages` and optional `tools` and `user_data` (see `user_data_values`).

    Raises:
        ValueError: A field cannot be sent; the error names the message and the field.
    """
    messages: Sequence[Mapping[str, Any]] = trajectory.get('messages') or ()
    if not messages:
        raise ValueError('messages: a chat requires at least one message')
    for name in ('images', 'videos', 'audios'):
        if trajectory.get(name):
            raise ValueError(f'{name}: pass media as content parts of messages')
    return pb.Trajectory(
        messages=[_message_to_proto(message, f'messages[{index}]') for index, message in enumerate(messages)],
        tools=[_tool_to_proto(tool) for tool in trajectory.get('tools') or ()],
        user_data=_user_data_to_proto(user_data_values(trajectory)),
    )


def trajectory_from_proto(trajectory: pb.Trajectory) -> Trajectory:
    """Return the chat of a protobuf message."""
    result = Trajectory(messages=[_message_from_proto(message) for message in trajectory.messages])
    if trajectory.tools:
        result['tools'] = [_tool_from_proto(tool) for tool in trajectory.tools]
    if trajectory.user_data:
        result['user_data'] = pack_user_data({key: plain_value(value) for key, value in trajectory.user_data.items()})
    return result


def _message_to_proto(message: Mapping[str, Any], field: str) -> pb.Message:
    role = message.get('role')
    if role not in _ROLES:
        raise ValueError(f'{field}.role must be one of {", ".join(_ROLES)}, got {role!r}')
    content: Any = message.get('content') or ()
    parts = [content] if isinstance(content, str) else content
    return pb.Message(
        role=_ROLES[role],
        parts=[_part_to_proto(part, f'{field}.content[{index}]') for index, part in enumerate(parts)],
        tool_calls=[_tool_call_to_proto(call, field) for call in message.get('tool_calls') or ()],
        tool_call_id=message.get('tool_call_id') or '',
        reasoning_content=message.get('reasoning_content') or '',
    )


def _part_to_proto(part: Any, field: str) -> pb.ContentPart:
    if isinstance(part, str):
        return pb.ContentPart(text=part)
    if 'text' in part:
        return pb.ContentPart(text=part['text'])
    for kind in _MEDIA:
        if kind in part:
            media = _media_to_proto(part[kind], part.get('media_type', f'{kind}/*'))
            return pb.ContentPart(
                image=media if kind == 'image' else None,
                video=media if kind == 'video' else None,
                audio=media if kind == 'audio' else None,
            )
    raise ValueError(f'{field} must have one of text, image, video, audio, got {sorted(part)}')


def _media_to_proto(source: str | bytes, media_type: str) -> pb.Media:
    if isinstance(source, bytes):
        return pb.Media(media_type=media_type, data=source)
    return pb.Media(media_type=media_type, uri=source)


def _tool_call_to_proto(call: Mapping[str, Any], field: str) -> pb.ToolCall:
    function = call.get('function', call)
    arguments: Any = function.get('arguments') or {}
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise ValueError(f'{field}.tool_calls: arguments are not valid JSON: {error}') from None
    return pb.ToolCall(
        tool_call_id=call.get('id') or '',
        name=function.get('name') or '',
        arguments=struct(arguments, field=f'{field}.tool_calls'),
    )


def _tool_to_proto(tool: Mapping[str, Any]) -> pb.Tool:
    function = tool.get('function', tool)
    return pb.Tool(
        name=function.get('name') or '',
        description=function.get('description') or '',
        parameters=struct(function.get('parameters') or {}, field='tools.parameters'),
    )


def _user_data_to_proto(values: Mapping[str, Any]) -> dict[str, struct_pb2.Value]:
    return {str(key): json_format.ParseDict(value, struct_pb2.Value()) for key, value in values.items()}


def _message_from_proto(message: pb.Message) -> Message:
    result = Message(role=cast(Any, _ROLE_NAMES.get(message.role, 'user')), content=_content(message.parts))
    if message.tool_calls:
        result['tool_calls'] = [_tool_call_from_proto(call) for call in message.tool_calls]
    if message.tool_call_id:
        result['tool_call_id'] = message.tool_call_id
    if message.reasoning_content:
        result['reasoning_content'] = message.reasoning_content
    return result


def _content(parts: Sequence[pb.ContentPart]) -> str | list[dict[str, Any]]:
    if all(part.HasField('text') for part in parts):
        return ''.join(part.text for part in parts)
    return [_part_from_proto(part) for part in parts]


def _part_from_proto(part: pb.ContentPart) -> dict[str, Any]:
    kind = part.WhichOneof('part')
    if kind is None or kind == 'text':
        return {'type': 'text', 'text': part.text}
    media: pb.Media = getattr(part, kind)
    return {'type': kind, kind: media.data or media.uri, 'media_type': media.media_type}


def _tool_call_from_proto(call: pb.ToolCall) -> ToolCall:
    arguments = plain_value(call.arguments)
    return ToolCall(id=call.tool_call_id, type='function', function={'name': call.name, 'arguments': arguments})


def _tool_from_proto(tool: pb.Tool) -> Tool:
    parameters = plain_value(tool.parameters)
    return Tool(
        type='function', function={'name': tool.name, 'description': tool.description, 'parameters': parameters}
    )
