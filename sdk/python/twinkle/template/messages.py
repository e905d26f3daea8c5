"""Check chats and bring them into the form that chat templates expect."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import Trajectory
from twinkle.template.errors import InvalidTrajectory

ROLES = ('system', 'user', 'assistant', 'tool')
"""Who may speak."""

_THINK_OPEN, _THINK_CLOSE = '<think>', '</think>'


def check_trajectory(trajectory: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the chat's messages as dicts of their own, having checked every field.

    Raises:
        InvalidTrajectory: names the field, such as `messages[1].role`.
    """
    messages: Any = trajectory.get('messages')
    if not isinstance(messages, Sequence) or isinstance(messages, str) or not messages:
        raise InvalidTrajectory('messages', 'must be a list of at least one message')
    for name in ('images', 'videos', 'audios'):
        if trajectory.get(name):
            raise InvalidTrajectory(name, 'are not supported yet; leave them out')
    return [_check_message(message, index) for index, message in enumerate(cast('Sequence[Any]', messages))]


def _check_message(message: Any, index: int) -> dict[str, Any]:
    path = f'messages[{index}]'
    if not isinstance(message, Mapping):
        raise InvalidTrajectory(path, f'must be an object with role and content, got {type(message).__name__}')
    # Columnar formats fill the fields a message does not have with nulls.
    given = cast('Mapping[str, Any]', message)
    checked = {name: value for name, value in given.items() if value is not None}
    role = checked.get('role')
    if role not in ROLES:
        raise InvalidTrajectory(f'{path}.role', f'must be one of {", ".join(ROLES)}, got {role!r}')
    if role == 'system' and index > 0:
        raise InvalidTrajectory(f'{path}.role', "may be 'system' only in the first message")
    calls = checked.pop('tool_calls', None)
    if calls:
        checked['tool_calls'] = [_check_call(call, f'{path}.tool_calls[{i}]') for i, call in enumerate(calls)]
    if 'content' not in checked and not calls:
        raise InvalidTrajectory(f'{path}.content', 'is missing; only a message with tool_calls may have none')
    checked['content'] = _text(checked.get('content', ''), f'{path}.content')
    reasoning = checked.get('reasoning_content', '')
    if not isinstance(reasoning, str):
        raise InvalidTrajectory(f'{path}.reasoning_content', f'must be text, got {type(reasoning).__name__}')
    return checked


def _text(content: Any, path: str) -> str:
    """Return content as text; templates of text models read nothing else."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidTrajectory(path, f'must be text or a list of parts, got {type(content).__name__}')
    pieces: list[str] = []
    for index, part in enumerate(cast('Sequence[Any]', content)):
        kind = cast('Mapping[str, Any]', part).get('type') if isinstance(part, Mapping) else None
        text = cast('Mapping[str, Any]', part).get('text') if kind == 'text' else None
        if not isinstance(text, str):
            raise InvalidTrajectory(
                f'{path}[{index}]', f'must be a text part; parts of type {kind!r} are not supported yet'
            )
        pieces.append(text)
    return ''.join(pieces)


def _check_call(call: Any, path: str) -> dict[str, Any]:
    function: Any = cast('Mapping[str, Any]', call).get('function') if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not cast('Mapping[str, Any]', function).get('name'):
        raise InvalidTrajectory(f'{path}.function.name', 'is missing')
    function = cast('Mapping[str, Any]', function)
    arguments: Any = function.get('arguments', {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or '{}')
        except json.JSONDecodeError as error:
            raise InvalidTrajectory(f'{path}.function.arguments', f'is not JSON: {error}') from error
    return {**cast('Mapping[str, Any]', call), 'type': 'function', 'function': {**function, 'arguments': arguments}}


def with_system(messages: list[dict[str, Any]], default_system: str | None) -> list[dict[str, Any]]:
    """Return the messages, beginning with `default_system` where they have no system message."""
    if default_system is None or messages[0]['role'] == 'system':
        return messages
    return [{'role': 'system', 'content': default_system}, *messages]


def with_thinking(message: dict[str, Any], *, is_kept_apart: bool) -> dict[str, Any]:
    """Return an assistant's message with its thinking where the chat template looks for it.

    Args:
        is_kept_apart: True: in `reasoning_content`; False: within `<think>` at the content's beginning.
    """
    if message['role'] != 'assistant':
        return message
    content: str = message['content']
    reasoning: str = message.get('reasoning_content', '')
    others = {name: value for name, value in message.items() if name != 'reasoning_content'}
    if is_kept_apart and not reasoning and content.lstrip().startswith(_THINK_OPEN) and _THINK_CLOSE in content:
        thought, _, said = content.partition(_THINK_CLOSE)
        reasoning = thought.partition(_THINK_OPEN)[2].strip('\n')
        return {**others, 'content': said.lstrip('\n'), 'reasoning_content': reasoning}
    if not is_kept_apart and reasoning:
        return {**others, 'content': f'{_THINK_OPEN}\n{reasoning}\n{_THINK_CLOSE}\n\n{content}'}
    return message


def tools_of(trajectory: Mapping[str, Any]) -> list[dict[str, Any]] | None:
    """Return the trajectory's tools as chat templates expect them, None where there are none.

    Raises:
        InvalidTrajectory: a tool has no name.
    """
    tools = cast('Trajectory', trajectory).get('tools') or []
    for index, tool in enumerate(tools):
        if not tool.get('function', {}).get('name'):
            raise InvalidTrajectory(f'tools[{index}].function.name', 'is missing')
    return [dict(tool) for tool in tools] or None
