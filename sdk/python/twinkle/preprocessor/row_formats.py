"""Conversion of rows to chats. The format of the rows is recognized by their columns.

The names follow TRL's table of dataset types. `Dataset.encode` reads rows with a `FormatReader`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from typing import Any, Literal, cast

from twinkle.data_format import pack_user_data
from twinkle.preprocessor.alpaca import AlpacaProcessor
from twinkle.preprocessor.base import Columns, Preprocessor, Row
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow
from twinkle.preprocessor.gsm8k import GSM8KProcessor
from twinkle.preprocessor.quality import MessageNormalizer

Use = Literal['training', 'prompt']
"""Use of a row: a complete example, or a prompt for sampling."""
Convert = Callable[[Row, Use], list[Row]]
"""Function that converts a row of a format, for a use, to the new columns of each chat."""


@dataclass(frozen=True)
class RowFormat:
    """A format of rows."""

    name: str
    columns: tuple[str, ...]
    """Columns that every row needs."""
    convert: Convert
    optional: tuple[str, ...] = ()
    """Columns that are also converted."""
    content: str = ''
    """Column that contains a string or a list of messages; empty for formats with one kind of content."""

    @property
    def all_columns(self) -> set[str]:
        """Columns that are converted."""
        return {*self.columns, *self.optional}


def _chat(messages: Sequence[Mapping[str, Any]], *, is_text: bool = False, **user_data: Any) -> Row:
    """Return the columns of a chat; texts are marked so that they are encoded without the chat template."""
    marks: Row = {'use_chat_template': False} if is_text else {}
    packed = {'user_data': pack_user_data(user_data)} if user_data else {}
    return {'messages': [dict(message) for message in messages], **marks, **packed}


def _turns(prompt: Any, completion: Any, **user_data: Any) -> Row:
    """Return the chat of a prompt and a completion, both strings or both lists; only the completion has labels."""
    if isinstance(prompt, str):
        turns = [{'role': 'user', 'content': prompt}] if prompt else []
        return _chat([*turns, {'role': 'assistant', 'content': completion}], is_text=True, **user_data)
    return _chat([*map(_unlabelled, prompt), *completion], **user_data)


def _unlabelled(message: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**message, 'weight': 0} if message.get('role') == 'assistant' else message


def _value(row: Row, column: str) -> Any:
    """Return a string or a list of messages. A string with the JSON of such a list is parsed, because CSV has no lists.

    Raises:
        InvalidRow: the value is neither text nor a list of messages.
    """
    value = row[column]
    if isinstance(value, str):
        return _messages_of_json(value) or value
    if not _is_messages(value):
        problem = 'is missing' if value is None else f'must be text or a list of messages, got {_kind(value)}'
        raise InvalidRow(column, problem)
    # Arrow stores null for the fields that a message does not have.
    return [{name: part for name, part in message.items() if part is not None} for message in value]


def _values(row: Row, *columns: str) -> list[Any]:
    """Return the values of columns, which are all strings or all lists of messages."""
    values = [_value(row, column) for column in columns]
    kinds = {isinstance(value, str) for value in values}
    if len(kinds) > 1:
        found = ', '.join(f'{column} is {_kind(value)}' for column, value in zip(columns, values, strict=True))
        raise InvalidRow(columns[0], f'and the other columns must be all strings or all lists of messages; {found}')
    return values


def _is_messages(value: Any) -> bool:
    items = cast('Sequence[Any]', value)
    is_list = isinstance(value, Sequence) and not isinstance(value, str | bytes) and len(items) > 0
    return is_list and all(isinstance(item, Mapping) and 'role' in item for item in items)


def _messages_of_json(text: str) -> list[Any] | None:
    if not text.lstrip().startswith('[{'):
        return None
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if _is_messages(value) else None


def _kind(value: Any) -> str:
    return {'str': 'text', 'NoneType': 'missing'}.get(type(value).__name__, type(value).__name__)


def _language_modeling(row: Row, use: Use) -> list[Row]:
    if not isinstance(row['text'], str):
        raise InvalidRow('text', f'must be text, got {_kind(row["text"])}; write chats to the column messages')
    # The end-of-sequence token follows a text for training, but not a prompt.
    return [_prompt(row['text']) if use == 'prompt' else _turns('', row['text'])]


def _messages(row: Row, use: Use) -> list[Row]:
    del use
    found = row['messages']
    return [{'messages': (_messages_of_json(found) or found) if isinstance(found, str) else found}]


def _prompt_only(row: Row, use: Use) -> list[Row]:
    del use
    return [_prompt(_value(row, 'prompt'))]


def _prompt(prompt: Any) -> Row:
    is_text = isinstance(prompt, str)
    return _chat([{'role': 'user', 'content': prompt}] if is_text else prompt, is_text=is_text)


def _prompt_completion(row: Row, use: Use) -> list[Row]:
    prompt, completion = _values(row, 'prompt', 'completion')
    return [_prompt(prompt) if use == 'prompt' else _turns(prompt, completion)]


def _preference(row: Row, use: Use) -> list[Row]:
    chosen, rejected = _values(row, 'chosen', 'rejected')
    prompt: Any = None if row.get('prompt') is None else _value(row, 'prompt')
    if isinstance(prompt, str) and not isinstance(chosen, str):
        # Some datasets have the question as text in addition to two complete chats.
        prompt = None
    elif prompt is not None:
        _values(row, 'prompt', 'chosen')
    if prompt is None:
        length = _common_length(chosen, rejected)
        prompt, chosen, rejected = chosen[:length], chosen[length:], rejected[length:]
        if not chosen and not rejected:
            raise InvalidRow('chosen', 'equals rejected, so the pair has no preference; remove the row')
    if use == 'prompt':
        return [_prompt(prompt)]
    return [_turns(prompt, chosen, preference='chosen'), _turns(prompt, rejected, preference='rejected')]


def _common_length(chosen: Sequence[Any], rejected: Sequence[Any]) -> int:
    """Return the length of the common beginning; a space before the difference belongs to the completions."""
    pairs = zip(chosen, rejected, strict=False)
    length = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], pairs))
    return length - 1 if length and chosen[length - 1] == ' ' and length < max(len(chosen), len(rejected)) else length


def _unpaired_preference(row: Row, use: Use) -> list[Row]:
    prompt, completion = _values(row, 'prompt', 'completion')
    label = {'true': True, 'false': False}.get(str(row['label']).lower(), row['label'])
    if label not in (True, False):
        raise InvalidRow('label', f'must be true or false, got {label!r:.60}')
    preference = 'chosen' if label else 'rejected'
    return [_prompt(prompt) if use == 'prompt' else _turns(prompt, completion, preference=preference)]


def _sharegpt(row: Row, use: Use) -> list[Row]:
    del use
    given = row['conversations']
    chat = MessageNormalizer().convert({'conversations': _json_list(given) if isinstance(given, str) else given})
    has_system = row.get('system') and chat['messages'][:1] and chat['messages'][0]['role'] != 'system'
    system = [{'role': 'system', 'content': row['system']}] if has_system else []
    return [{'messages': [*system, *chat['messages']]}]


def _json_list(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return text


def _alpaca(row: Row, use: Use) -> list[Row]:
    chat = AlpacaProcessor().convert(row)
    return [{'messages': chat['messages'][:-1] if use == 'prompt' else chat['messages']}]


def _gsm8k(row: Row, use: Use) -> list[Row]:
    return [GSM8KProcessor(add_assistant=use == 'training').convert(row)]


_FORMATS = (
    RowFormat('messages', ('messages',), _messages),
    RowFormat('sharegpt', ('conversations',), _sharegpt, ('system',)),
    RowFormat('preference', ('chosen', 'rejected'), _preference, ('prompt',), content='chosen'),
    RowFormat('unpaired_preference', ('prompt', 'completion', 'label'), _unpaired_preference, content='completion'),
    RowFormat('prompt_completion', ('prompt', 'completion'), _prompt_completion, content='completion'),
    RowFormat('alpaca', ('instruction', 'output'), _alpaca, ('input', 'system')),
    RowFormat('gsm8k', ('question', 'answer'), _gsm8k),
    RowFormat('prompt_only', ('prompt',), _prompt_only, content='prompt'),
    RowFormat('language_modeling', ('text',), _language_modeling, content='text'),
)
ROW_FORMATS: Mapping[str, RowFormat] = {item.name: item for item in _FORMATS}
"""Formats by name."""


def check_format(name: str | None) -> None:
    """Check the name of a format.

    Raises:
        InvalidArguments: the name is unknown.
    """
    if name is not None and name not in ROW_FORMATS:
        raise InvalidArguments(f'format: unknown format {name!r}; use one of {", ".join(ROW_FORMATS)}')


def recognized_format(row: Row) -> RowFormat:
    """Return the format whose columns the row has.

    Additional columns are allowed. `messages` has priority. `text` is used only if nothing else fits.

    Raises:
        InvalidRow: no format fits, or several formats fit.
    """
    if 'messages' in row:
        return ROW_FORMATS['messages']
    fitting = [item for item in _FORMATS if set(item.columns) <= row.keys()]
    best = [item for item in fitting if not _is_part(item, fitting)]
    if len(best) > 1:
        best = [item for item in best if item.name != 'language_modeling']
    if len(best) == 1:
        return best[0]
    found = ', '.join(sorted(row)) or 'no columns'
    if best:
        names = ' and '.join(item.name for item in best)
        raise InvalidRow('messages', f'is missing, and the columns ({found}) fit {names}; pass format={best[0].name!r}')
    known = '; '.join(f'{item.name}: {", ".join(item.columns)}' for item in _FORMATS)
    raise InvalidRow(
        'messages',
        f'is missing, and the columns ({found}) fit no format. Rename columns, or write messages with map(function).'
        f' Formats: {known}',
    )


def _is_part(item: RowFormat, fitting: Sequence[RowFormat]) -> bool:
    """Return whether another fitting format uses all required columns of `item` and more."""
    return any(set(item.columns) < other.all_columns for other in fitting if other is not item)


class FormatReader:
    """Converts rows of one format to chats.

    Args:
        name: name of the format. Default: the format that fits the first row.
        is_prompt: whether to return prompts for sampling, without their completions. Default: False.

    Raises:
        InvalidArguments: the name is unknown.
    """

    def __init__(self, name: str | None = None, *, is_prompt: bool = False) -> None:
        check_format(name)
        self._name = name
        self._format = None if name is None else ROW_FORMATS[name]
        self.is_prompt = is_prompt
        self._reports: list[str] = [] if name is None else [f'rows are read as {name}']

    def again(self) -> 'FormatReader':
        """Return a new reader with the same arguments."""
        return FormatReader(self._name, is_prompt=self.is_prompt)

    def read(self, row: Row) -> list[Row]:
        """Return the chats of a row: two for a preference pair, chosen first. Other columns are kept.

        Raises:
            InvalidRow: the row does not have the format.
        """
        if self._format is None:
            self._format = recognized_format(row)
            columns = [name for name in (*self._format.optional, *self._format.columns) if name in row]
            content = row.get(self._format.content) if self._format.content else None
            kind = ' (text)' if isinstance(content, str) and not _messages_of_json(content) else ''
            self._reports.append(f'rows are read as {self._format.name}{kind}, from the columns {", ".join(columns)}')
        found = self._format
        if found.name == 'messages' and not isinstance(row.get('messages'), str):
            return [row]
        missing = [name for name in found.columns if row.get(name) is None]
        if missing:
            given = ', '.join(sorted(name for name in row if row[name] is not None)) or 'no columns'
            problem = f'is missing: the format {found.name} needs {", ".join(found.columns)}, and the row has {given}'
            raise InvalidRow(missing[0], problem)
        chats = found.convert(row, 'prompt' if self.is_prompt else 'training')
        others = {name: value for name, value in row.items() if name not in found.all_columns}
        return [{**others, **chat, **_joined_data(others, chat)} for chat in chats]

    def new_reports(self) -> list[str]:
        """Return the sentence that names the format, in the first call only. Empty for the format `messages`."""
        reports, self._reports = self._reports, []
        return [] if self._format is not None and self._format.name == 'messages' else reports


def _joined_data(row: Row, chat: Row) -> Row:
    """Return the user data of a row together with the user data of its chat."""
    if row.get('user_data') is None or 'user_data' not in chat:
        return {}
    given = row['user_data']
    return {'user_data': [*(given if isinstance(given, list) else [given]), *chat['user_data']]}


class FormatProcessor(Preprocessor):
    """Converts rows of a known format to `messages`, as `Dataset.encode` does by itself; see docs/datasets.md.

    Use the processor before filters and preprocessors that need chats, or for one of several datasets.
    """

    def __init__(self, format: str | None = None, *, is_prompt: bool = False) -> None:  # noqa: A002 - public name
        self._reader = FormatReader(format, is_prompt=is_prompt)

    def __call__(self, rows: Columns) -> Columns:
        """Return the columns of the chats; a preference pair becomes two rows.

        Raises:
            InvalidRow: a row does not have the format.
        """
        converted: list[Row] = []
        for index, row in enumerate(self.map_col_to_row(rows)):
            try:
                converted += self._reader.read(row)
            except InvalidRow as error:
                raise error.at(index) from error
        return self.map_row_to_col(converted)

    def end_pass(self) -> list[str]:
        """Return the sentence that names the format."""
        return self._reader.new_reports()
