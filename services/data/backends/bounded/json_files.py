"""Read the rows of JSON lines and of JSON lists, one object at a time."""

import json
import re
import sys
from collections import Counter
from collections.abc import Generator, Iterable, Iterator
from contextlib import closing, contextmanager, nullcontext
from itertools import count
from typing import IO, Any, cast

from twinkle.dataset import UnreadableFile
from twinkle.dataset.row_bounds import MAX_CHARACTERS, Row, RowBounds, held

MAX_DEPTH = 64
"""Maximum number of levels of nested lists and objects in a row."""
_READ_CHARACTERS = 1 << 16
"""Minimum number of characters that are read from a file at once."""
_PARSED_BYTES = {'"': 40, '{': 250, '[': 96, ',': 48, ':': 110}
"""Memory per structural character, in this order: half of a text without its characters, an object, a list, an element
of a list, and an element of an object."""
_EMPTY_TEXT_BYTES = 80
"""Memory of an empty text."""


def rows_of_lines(name: str, lines: Iterable[str], bounds: RowBounds | None = None) -> Iterator[Row]:
    """Yield the rows of JSON lines.

    Args:
        name: name of the file, for errors.
        lines: its lines; empty lines are skipped.
        bounds: limits, charged for a line while it is parsed. Default: no limit.

    Raises:
        UnreadableFile: a line is not a JSON object, has a name twice in an object or too many levels, or is not UTF-8
            text.
        Exception: `bounds` refused the line.
    """
    try:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                location = f'{name}, line {number}'
                with nullcontext() if bounds is None else held(bounds, parsed_bytes(line)), _json_errors(location):
                    row = _checked(_DECODER.decode(line), line, location)
                yield row
    except UnicodeDecodeError as error:
        raise UnreadableFile(f'{name} is not UTF-8 text') from error


def rows_of_list(name: str, file: IO[str], bounds: RowBounds | None = None) -> Iterator[Row]:
    """Yield the rows of a file that contains one JSON list of objects, reading it in pieces.

    Args:
        name: name of the file, for errors.
        file: the opened file.
        bounds: limits, charged for the text in memory and its values. If given, an object may have at most
            `MAX_CHARACTERS` characters. Default: no limit.

    Raises:
        UnreadableFile: the file does not contain a list of objects, the text is not UTF-8, or an object has a name
            twice, too many characters or too many levels.
        Exception: `bounds` refused a piece of the text.
    """
    with closing(_Text(name, file, bounds)) as text:
        if not text.take('['):
            raise UnreadableFile(f'{name} must contain a list of objects')
        is_complete = text.take(']')
        for index in count():
            if is_complete:
                break
            yield text.take_object(f'{name}, item {index}')
            is_complete = text.take(']')
            if not is_complete and not text.take(','):
                raise UnreadableFile(f'{name} is not JSON: item {index} is not followed by a comma or the end')
        if text.peek():
            raise UnreadableFile(f'{name} is not JSON: other text follows the list')


class _Text:
    """The text of a file, read in pieces; bounds are charged for the part that is in memory."""

    def __init__(self, name: str, file: IO[str], bounds: RowBounds | None) -> None:
        self._name, self._file, self._bounds = name, file, bounds
        self._text, self._position = '', 0
        self._held_bytes = 0

    def peek(self) -> str:
        """Return the next character that is not whitespace; empty at the end of the file."""
        self._position = _after_spaces(self._text, self._position)
        while self._position == len(self._text) and self._read():
            self._position = _after_spaces(self._text, 0)
        return self._text[self._position : self._position + 1]

    def take(self, character: str) -> bool:
        """Skip whitespace, and then `character` if it follows; return whether `character` was skipped."""
        is_next = self.peek() == character
        self._position += is_next
        return is_next

    def take_object(self, location: str) -> Row:
        """Return the next value, which must be an object."""
        self.peek()
        while True:
            begin = self._position
            try:
                with _json_errors(location):
                    value, self._position = _DECODER.raw_decode(self._text, begin)
            except _Incomplete:
                if not self._read():
                    raise
            else:
                return _checked(value, self._text[begin : self._position], location)

    def close(self) -> None:
        self._hold(0)

    def _read(self) -> bool:
        """Read more text, at least doubling the unparsed text within the limit; return False at the end of the file."""
        rest = self._text[self._position :]
        count = max(len(rest), _READ_CHARACTERS)
        if self._bounds is not None:
            count = min(count, MAX_CHARACTERS + 1 - len(rest))
        if count <= 0:
            raise UnreadableFile(f'{self._name} has an object of more than {MAX_CHARACTERS} characters')
        try:
            added = self._file.read(count)
        except UnicodeDecodeError as error:
            raise UnreadableFile(f'{self._name} is not UTF-8 text') from error
        self._text, self._position = rest + added, 0
        if self._bounds is not None:
            self._hold(parsed_bytes(self._text))
        return bool(added)

    def _hold(self, size_bytes: int) -> None:
        if self._bounds is not None:
            self._bounds.charge(size_bytes - self._held_bytes)
            self._held_bytes = size_bytes


def parsed_bytes(text: str) -> int:
    """Return an upper bound on the memory of a JSON text together with its values, in bytes."""
    # A string object has 56 to 76 bytes beside its characters, depending on the version of Python.
    width_bytes = 1 if text.isascii() else max(round((sys.getsizeof(text) - 64) / len(text)), 1)
    if '\\u' in text:  # one escaped character may widen all characters of a text, which is copied while it is parsed
        width_bytes = 16
    values_bytes = sum(size_bytes * text.count(mark) for mark, size_bytes in _PARSED_BYTES.items())
    return sys.getsizeof(text) + width_bytes * len(text) + _EMPTY_TEXT_BYTES + values_bytes


def _after_spaces(text: str, position: int) -> int:
    return cast('re.Match[str]', _SPACES.match(text, position)).end()


def _object_of(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        name = next(name for name, occurrences in Counter(name for name, _ in pairs).items() if occurrences > 1)
        raise _RepeatedName(name)
    return value


_DECODER = json.JSONDecoder(object_pairs_hook=_object_of)
_SPACES = re.compile(r'[ \t\n\r]*')


class _RepeatedName(ValueError):
    """An object has several values with one name."""


class _Incomplete(UnreadableFile):
    """A text is not JSON, perhaps because its end is missing."""


@contextmanager
def _json_errors(location: str) -> Generator[None]:
    try:
        yield
    except json.JSONDecodeError as error:
        raise _Incomplete(f'{location} is not JSON: {error.msg} at column {error.colno}') from error
    except _RepeatedName as error:
        problem = f'{location} has the name {error.args[0]!r} twice in an object; give each value its own name'
        raise UnreadableFile(problem) from error
    except ValueError as error:
        raise UnreadableFile(f'{location} has an integer with too many digits') from error
    except RecursionError as error:
        raise UnreadableFile(f'{location} is nested more than {MAX_DEPTH} levels deep') from error


def _checked(value: Any, text: str, location: str) -> Row:
    """Return the value of a text if it can be a row."""
    if not isinstance(value, dict):
        raise UnreadableFile(f'{location} must be an object, got {type(value).__name__}')
    row = cast('Row', value)
    # A value has at most as many levels as brackets.
    if text.count('[') + text.count('{') > MAX_DEPTH and not _is_shallow(row):
        raise UnreadableFile(f'{location} is nested more than {MAX_DEPTH} levels deep')
    # An escape may encode half of a surrogate pair, which UTF-8 cannot represent.
    if ('\\ud' in text or '\\uD' in text) and not _is_encodable(row):
        raise UnreadableFile(f'{location} has an unpaired surrogate')
    return row


def _is_shallow(value: Any) -> bool:
    level: list[Any] = [value]
    for _ in range(MAX_DEPTH):
        level = [item for parent in level for item in _items(parent) if isinstance(item, dict | list)]
    return not level


def _items(value: Any) -> Iterable[Any]:
    return cast('dict[str, Any]', value).values() if isinstance(value, dict) else cast('list[Any]', value)


def _is_encodable(value: Any) -> bool:
    try:
        json.dumps(value, ensure_ascii=False).encode()
    except UnicodeEncodeError:
        return False
    return True
