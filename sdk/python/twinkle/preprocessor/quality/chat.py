"""Functions that read chats from untrusted rows and convert them to text."""

import json
from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.preprocessor.base import Row
from twinkle.preprocessor.errors import InvalidRow

COLUMN = 'messages'


def messages_of(row: Row) -> list[Mapping[str, Any]]:
    """Return the messages of a row.

    Raises:
        InvalidRow: the messages are not a list of objects that each have a role.
    """
    messages = row.get(COLUMN)
    if not isinstance(messages, list):
        problem = 'is missing' if messages is None else f'must be a list, got {type(messages).__name__}'
        raise InvalidRow(COLUMN, problem)
    for index, message in enumerate(cast('list[Any]', messages)):
        if not isinstance(message, Mapping):
            raise InvalidRow(f'{COLUMN}[{index}]', f'must be an object, got {type(message).__name__}')
        if not isinstance(cast('Mapping[str, Any]', message).get('role'), str):
            raise InvalidRow(f'{COLUMN}[{index}].role', 'must be text')
    return cast('list[Mapping[str, Any]]', messages)


def content_of(message: Mapping[str, Any], index: int) -> str:
    """Return the text of a message; parts of other types become placeholders such as `<image>`.

    Raises:
        InvalidRow: the content is neither text nor a list of parts.
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
    """Return the `reasoning_content` of a message; empty if the field is missing.

    Raises:
        InvalidRow: the value is not text.
    """
    reasoning = message.get('reasoning_content')
    if reasoning is not None and not isinstance(reasoning, str):
        raise InvalidRow(f'{COLUMN}[{index}].reasoning_content', f'must be text, got {type(reasoning).__name__}')
    return reasoning or ''


def calls_of(message: Mapping[str, Any], index: int) -> list[Mapping[str, Any]]:
    """Return the tool calls of a message.

    Raises:
        InvalidRow: the calls are not a list of objects.
    """
    calls = message.get('tool_calls')
    if calls is None:
        return []
    if not isinstance(calls, list) or not all(isinstance(call, Mapping) for call in cast('list[Any]', calls)):
        raise InvalidRow(f'{COLUMN}[{index}].tool_calls', 'must be a list of objects')
    return cast('list[Mapping[str, Any]]', calls)


def texts_of(message: Mapping[str, Any], index: int) -> list[str]:
    """Return the non-empty texts of a message: its reasoning, its content and its tool calls as JSON.

    Raises:
        InvalidRow: a field cannot be read.
    """
    calls = [canonical(call.get('function', call)) for call in calls_of(message, index)]
    return [text for text in (reasoning_of(message, index), content_of(message, index), *calls) if text]


def canonical(value: Any) -> str:
    """Return a value as canonical JSON, which is equal for equal values.

    Raises:
        InvalidRow: the value cannot be represented as JSON.
    """
    try:
        return json.dumps(value, ensure_ascii=False, sort_keys=True)
    except (TypeError, ValueError, RecursionError) as error:
        raise InvalidRow(f'{COLUMN}.tool_calls', 'cannot be written as JSON') from error


def _part_text(part: Any, index: int) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, Mapping):
        raise InvalidRow(f'{COLUMN}[{index}].content', f'contains a part of type {type(part).__name__}')
    fields = cast('Mapping[str, Any]', part)
    text = fields.get('text')
    return text if isinstance(text, str) else f'<{fields.get("type", "part")}>'
