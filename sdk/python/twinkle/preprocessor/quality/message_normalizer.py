"""One way to write chats, out of the several that datasets use."""

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
    """Brings chats into `messages` of `role` and `content`; other columns stay.

    Reads `messages`, or `conversations` with `from` and `value`; roles such as human, gpt and observation; one
    `function_call` as a list of `tool_calls`. Line ends become newlines, blanks around a text go, and so do fields that
    are None. No message is left out, nor any word of one. What is normal already stays as it is.
    """

    def convert(self, row: Row) -> Row:
        """Return the row with its chat rewritten.

        Raises:
            InvalidRow: there is no chat, or a message is no object with a role.
        """
        column = next((name for name in _COLUMNS if row.get(name) is not None), None)
        if column is None:
            raise InvalidRow(COLUMN, 'is missing, and so is conversations')
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
