"""Preprocessor that converts the chat formats of different datasets to one format."""

from collections.abc import Mapping
from typing import Any, cast

from twinkle.preprocessor.base import Row, RowPreprocessor
from twinkle.preprocessor.errors import InvalidRow
from twinkle.preprocessor.quality.chat import COLUMN

_COLUMNS = (COLUMN, 'conversations', 'conversation')
_ROLES = {
    'human': 'user',
    'prompter': 'user',
    'gpt': 'assistant',
    'bot': 'assistant',
    'chatgpt': 'assistant',
    'model': 'assistant',
    'function_call': 'assistant',
    'developer': 'system',
    'function': 'tool',
    'function_response': 'tool',
    'observation': 'tool',
    'tool_response': 'tool',
    'ipython': 'tool',
}
_NAMES = {'from': 'role', 'value': 'content'}


class MessageNormalizer(RowPreprocessor):
    """Converts chats to `messages` with `role` and `content`; other columns are kept.

    A chat may be in the column `messages`, `conversations` or `conversation`. Its messages may have the fields `from`
    and `value`, roles such as human, gpt and observation, and a single `function_call`, which becomes a list of
    `tool_calls`. Line ends become newlines. Null fields and whitespace around texts are removed. All messages and all
    other text are kept, and normalizing a chat twice gives the same result.
    """

    def convert(self, row: Row) -> Row:
        """Return the row with its chat normalized.

        Raises:
            InvalidRow: the row has no chat, or a message is not an object with a role.
        """
        column = next((name for name in _COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise InvalidRow(COLUMN, f'is missing; the row needs one of {", ".join(_COLUMNS)}')
        given = row[column]
        if not isinstance(given, list):
            raise InvalidRow(column, f'must be a list of messages, got {type(given).__name__}')
        messages = [_normal(message, f'{column}[{i}]') for i, message in enumerate(cast('list[Any]', given))]
        others = {name: value for name, value in row.items() if name not in {column, COLUMN}}
        return {COLUMN: messages, **others}


def _normal(message: Any, path: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRow(path, f'must be an object, got {type(message).__name__}')
    given = {name: value for name, value in cast('Mapping[str, Any]', message).items() if value is not None}
    renamed = {
        name if _NAMES.get(name, name) in given else _NAMES.get(name, name): value for name, value in given.items()
    }
    role = renamed.pop('role', None)
    if not isinstance(role, str):
        raise InvalidRow(f'{path}.role', 'must be text')
    plain = role.strip().lower()
    normal: dict[str, Any] = {'role': _ROLES.get(plain, plain), 'content': _text(renamed.pop('content', ''))}
    call = renamed.get('function_call')
    if isinstance(call, Mapping) and not renamed.get('tool_calls'):
        del renamed['function_call']
        renamed['tool_calls'] = [{'type': 'function', 'function': dict(cast('Mapping[str, Any]', call))}]
    return {
        **normal,
        **{name: _text(value) if name == 'reasoning_content' else value for name, value in renamed.items()},
    }


def _text(value: Any) -> Any:
    return value.replace('\r\n', '\n').replace('\r', '\n').strip() if isinstance(value, str) else value
