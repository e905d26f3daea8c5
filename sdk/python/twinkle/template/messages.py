"""Check chats and convert them to the form that chat templates expect."""

import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, cast

from twinkle.template.errors import InvalidTrajectory

ROLES = ('system', 'user', 'assistant', 'tool')
"""Valid values of a message's `role`."""


def check_trajectory(trajectory: Any, *, is_media_read: bool = False) -> list[dict[str, Any]]:
    """Validate every field of a chat and return copies of its messages.

    Args:
        trajectory: the chat.
        is_media_read: whether the fields `images`, `videos` and `audios` are allowed; they are not checked here.

    Raises:
        InvalidTrajectory: a field is malformed. The error names it, such as `messages[1].role`.
    """
    if not isinstance(trajectory, Mapping):
        raise InvalidTrajectory('', f'the chat must be an object with messages, got {type(trajectory).__name__}')
    given = cast('Mapping[str, Any]', trajectory)
    messages: Any = given.get('messages')
    if not _is_list(messages) or not messages:
        raise InvalidTrajectory('messages', 'must be a list of at least one message')
    for name in ('images', 'videos', 'audios'):
        if given.get(name) and not is_media_read:
            problem = 'are given, but the model does not support them or they are disabled in the template'
            raise InvalidTrajectory(name, problem)
    return [_check_message(message, index) for index, message in enumerate(cast('Sequence[Any]', messages))]


def _check_message(message: Any, index: int) -> dict[str, Any]:
    path = f'messages[{index}]'
    if not isinstance(message, Mapping):
        raise InvalidTrajectory(path, f'must be an object with role and content, got {type(message).__name__}')
    # Columnar formats store null for fields that a message does not have.
    given = cast('Mapping[str, Any]', message)
    checked = {name: value for name, value in given.items() if value is not None}
    role = checked.get('role')
    if role not in ROLES:
        raise InvalidTrajectory(f'{path}.role', f'must be one of {", ".join(ROLES)}, got {role!r}')
    if role == 'system' and index > 0:
        raise InvalidTrajectory(f'{path}.role', "may be 'system' only in the first message")
    calls = _check_calls(checked.pop('tool_calls', None), role, f'{path}.tool_calls')
    if calls:
        checked['tool_calls'] = calls
    if 'content' not in checked and not calls:
        raise InvalidTrajectory(f'{path}.content', 'is missing; only a message with tool_calls may have none')
    checked['content'] = _text(checked.get('content', ''), f'{path}.content')
    if checked.get('weight', 1) not in (0, 1):
        raise InvalidTrajectory(f'{path}.weight', f'must be 0 or 1, got {checked["weight"]!r:.60}')
    for name in ('reasoning_content', 'tool_call_id'):
        if not isinstance(checked.get(name, ''), str):
            raise InvalidTrajectory(f'{path}.{name}', f'must be text, got {type(checked[name]).__name__}')
    for name, value in checked.items():
        if isinstance(value, str):
            _refuse_lone_surrogates(value, f'{path}.{name}')
    return checked


def _text(content: Any, path: str) -> str:
    """Return the content as text, the only form that the templates of text models accept."""
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence):
        raise InvalidTrajectory(path, f'must be text or a list of parts, got {type(content).__name__}')
    pieces: list[str] = []
    for index, part in enumerate(cast('Sequence[Any]', content)):
        kind = cast('Mapping[str, Any]', part).get('type') if isinstance(part, Mapping) else None
        text = cast('Mapping[str, Any]', part).get('text') if kind == 'text' else None
        if not isinstance(text, str):
            raise InvalidTrajectory(f'{path}[{index}]', f'must be a part of type text with a text, got {part!r:.60}')
        pieces.append(text)
    return ''.join(pieces)


def _check_calls(calls: Any, role: str, path: str) -> list[dict[str, Any]]:
    if calls is None:
        return []
    if not _is_list(calls):
        raise InvalidTrajectory(path, f'must be a list of calls, got {type(calls).__name__}')
    if calls and role != 'assistant':
        raise InvalidTrajectory(path, f'may be given by the assistant only, not by {role!r}')
    return [_check_call(call, f'{path}[{index}]') for index, call in enumerate(cast('Sequence[Any]', calls))]


def _check_call(call: Any, path: str) -> dict[str, Any]:
    fields = _object(call, path)
    function = _object(fields.get('function', {}), f'{path}.function')
    _check_name(function, f'{path}.function.name')
    path = f'{path}.function.arguments'
    arguments: Any = function.get('arguments')
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or '{}')
        except (ValueError, RecursionError) as error:
            raise InvalidTrajectory(path, f'is not JSON: {error}') from error
    arguments = _object({} if arguments is None else arguments, path)
    _refuse_non_json(arguments, path)
    return {**fields, 'type': 'function', 'function': {**function, 'arguments': arguments}}


def with_system(messages: list[dict[str, Any]], default_system: str | None) -> list[dict[str, Any]]:
    """Return the messages; `default_system` is prepended if they have no system message."""
    if default_system is None or messages[0]['role'] == 'system':
        return messages
    return [{'role': 'system', 'content': default_system}, *messages]


def check_special_texts(trajectory: Mapping[str, Any], special_texts: Iterable[str]) -> None:
    """Refuse a valid chat whose messages or tools contain the text of a special token.

    Raises:
        InvalidTrajectory: the text of a special token was found. The error names the field and the token.
    """
    waiting: list[tuple[str, Any]] = [(name, trajectory.get(name)) for name in ('messages', 'tools')]
    for path, value in waiting:
        if isinstance(value, Mapping):
            items = cast('Mapping[Any, Any]', value).items()
            waiting += [(f'{path} (a name)', name) for name, _ in items]
            waiting += [(f'{path}.{name}', item) for name, item in items]
        elif _is_list(value):
            waiting += [(f'{path}[{index}]', item) for index, item in enumerate(value)]
        elif isinstance(value, str) and (found := [text for text in special_texts if text in value]):
            raise InvalidTrajectory(path, f'contains the special token {found[0]!r}; remove it')


def check_tools(tools: Any) -> list[dict[str, Any]] | None:
    """Validate a trajectory's tools and return copies in the form that chat templates expect; None without tools.

    Raises:
        InvalidTrajectory: a field is malformed. The error names it, such as `tools[0].function.name`.
    """
    if tools is None:
        return None
    if not _is_list(tools):
        raise InvalidTrajectory('tools', f'must be a list of tools, got {type(tools).__name__}')
    checked: list[dict[str, Any]] = []
    for index, tool in enumerate(cast('Sequence[Any]', tools)):
        path = f'tools[{index}]'
        fields = _object(tool, path)
        _check_name(_object(fields.get('function', {}), f'{path}.function'), f'{path}.function.name')
        _refuse_non_json(fields, path)
        checked.append(fields)
    return checked or None


def _is_list(value: Any) -> bool:
    return isinstance(value, Sequence) and not isinstance(value, str | bytes)


def _object(value: Any, path: str) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise InvalidTrajectory(path, f'must be an object, got {type(value).__name__}')
    return dict(cast('Mapping[str, Any]', value))


def _check_name(function: Mapping[str, Any], path: str) -> None:
    name = function.get('name')
    if name is None or name == '':
        raise InvalidTrajectory(path, 'is missing')
    if not isinstance(name, str):
        raise InvalidTrajectory(path, f'must be text, got {type(name).__name__}')
    _refuse_lone_surrogates(name, path)


def _refuse_lone_surrogates(text: str, path: str) -> None:
    """Refuse lone surrogates: JSON can express them, but UTF-8 and therefore tokenizers cannot."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise InvalidTrajectory(path, f'has a lone surrogate at character {error.start}; remove it') from None


def _refuse_non_json(value: Any, path: str) -> None:
    """Refuse values that cannot be written as JSON; chat templates write tools and arguments as JSON."""
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidTrajectory(path, f'cannot be written as JSON: {error}') from error
