"""Chats as they are found in rows: read without trust, into text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidRow

COLUMN = 'messages'


def messages_of(row: Row) -> list[Mapping[str, Any]]:
    """Return the messages of a row.

    Raises:
        InvalidRow: they are no list of objects, each with a role.
    """
    messages = row.get(COLUMN)
    if not isinstance(messages, list):
        found = 'is missing' if messages is None else f'must be a list, got {type(messages).__name__}'
        raise InvalidRow(COLUMN, found)
    for index, message in enumerate(cast('list[Any]', messages)):
        if not isinstance(message, Mapping):
            raise InvalidRow(f'{COLUMN}[{index}]', f'must be an object, got {type(message).__name__}')
        if not isinstance(cast('Mapping[str, Any]', message).get('role'), str):
            raise InvalidRow(f'{COLUMN}[{index}].role', 'must be text')
    return cast('list[Mapping[str, Any]]', messages)


def content_of(message: Mapping[str, Any], index: int) -> str:
    """Return the text of a message; parts of other kinds are placeholders such as `<image>`.

    Raises:
        InvalidRow: its content is neither text nor a list of parts.
    """
    content = message.get('content')
    if content is None:
        return ''
    if isinstance(content, str):
        return content
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise InvalidRow(f'{COLUMN}[{index}].content', f'must be text or parts, got {type(content).__name__}')
    return ''.join(_part_text(part, index) for part in cast('Sequence[Any]', content))


def reasoning_of(message: Mapping[str, Any], index: int) -> str:
    """Return what was thought before the content.

    Raises:
        InvalidRow: it is no text.
    """
    reasoning = message.get('reasoning_content')
    if reasoning is not None and not isinstance(reasoning, str):
        raise InvalidRow(f'{COLUMN}[{index}].reasoning_content', f'must be text, got {type(reasoning).__name__}')
    return reasoning or ''


def calls_of(message: Mapping[str, Any], index: int) -> list[Mapping[str, Any]]:
    """Return the tool calls of a message.

    Raises:
        InvalidRow: they are no list of objects.
    """
    calls = message.get('tool_calls')
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in cast('list[Any]', calls)):
        raise InvalidRow(f'{COLUMN}[{index}].tool_calls', 'must be a list of objects')
    return cast('list[Mapping[str, Any]]', calls)


def said(message: Mapping[str, Any], index: int) -> list[str]:
    """Return what a turn says, without its role: thought, content and tool calls, each where it is not empty."""
    calls = [canonical(call.get('function', call)) for call in calls_of(message, index)]
    return [text for text in (reasoning_of(message, index), content_of(message, index), *calls) if text]


def canonical(value: Any) -> str:
    """Return a value as JSON that is the same for equal values.

    Raises:
        InvalidRow: it has no such form.
    """
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRow(f'{COLUMN}.tool_calls', 'have no JSON form') from error


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRow(f'{COLUMN}[{index}].content', f'holds a part that is a {type(part).__name__}')
    fields = cast('Mapping[str, Any]', part)
    text = fields.get('text')
    return text if isinstance(text, str) else f'<{fields.get("type", "part")}>'
