"""Tool calls as JSON without tags, the format of Llama and Mistral."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import Tool
from twinkle.tool_calls.found_call import FoundCall, name_and_arguments
from twinkle.tool_calls.json_value import may_grow, read_json, value_end

_BRACKET = re.compile(r'[{\[]')
_BEFORE = re.compile(r'(?:```(?:json)?|<\|python_tag\|>|\[TOOL_CALLS\])\s{0,8}\Z')
_AFTER = re.compile(r'\s{0,8}```')
_FENCE_BEGIN = re.compile(r'`{1,3}(?:j(?:s(?:o(?:n)?)?)?)?\s{0,8}\Z')
_FENCE_END = re.compile(r'\s{0,8}`{0,2}\Z')
_FIRST_NAME = re.compile(r'\{\s*+"([^"\\]*+)"')
_WINDOW = 32
"""Number of characters before a call that are searched for its delimiter."""
_FIELDS = {'id', 'type', 'name', 'arguments', 'parameters'}


class JsonParser:
    """Parser of `{"name": ..., "arguments": {...}}` (or `parameters`) or a list of such objects, even in a code fence.

    An object with other fields is not a call, because models also answer in JSON.
    """

    name = 'json'

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[FoundCall]:
        """Yield the complete calls in `text`; a list counts only if all its items are calls. Reads the text once."""
        del tools
        position = 0
        while bracket := _BRACKET.search(text, position):
            begin = bracket.start()
            position, is_closed = value_end(text, begin)
            called = _called(text[begin:position]) if is_closed else []
            if called:
                first, end = _wrapped(text, begin, position)
                position = end
                # The characters of a list are assigned to its first call.
                yield FoundCall(first, end, *called[0])
                yield from (FoundCall(end, end, *each) for each in called[1:])

    def pending(self, text: str) -> int:
        """Return the index of the first JSON value, or of its fence, that may still become a call.

        A value never becomes a call if its first field is not a field of calls. See `StreamedParser`.
        """
        position = 0
        while bracket := _BRACKET.search(text, position):
            begin = bracket.start()
            position, is_closed = value_end(text, begin)
            first, end = _wrapped(text, begin, position)
            if not is_closed and may_grow(text, position) and _may_be_call(text, begin):
                return first
            if is_closed and text[first] == '`' and _called(text[begin:position]):
                if _FENCE_END.match(text, position):
                    return first
                position = end
        fence = _FENCE_BEGIN.search(text, position)
        return fence.start() if fence else len(text)


def _may_be_call(text: str, begin: int) -> bool:
    name = _FIRST_NAME.match(text, begin)
    return name is None or name[1] in _FIELDS or name[1] == 'function'


def _called(text: str) -> list[tuple[str, dict[str, Any]]]:
    try:
        value = read_json(text)
    except ValueError:
        return []
    items: list[Any] = cast('list[Any]', value) if isinstance(value, list) else [value]
    calls = [_call(item) for item in items]
    return [call for call in calls if call is not None] if None not in calls else []


def _call(item: Any) -> tuple[str, dict[str, Any]] | None:
    if not isinstance(item, Mapping):
        return None
    fields = cast('Mapping[str, Any]', item)
    if 'function' in fields and fields.keys() <= {'id', 'type', 'function'}:
        return _call(fields['function'])
    is_call = fields.keys() <= _FIELDS and ('arguments' in fields or 'parameters' in fields)
    return name_and_arguments(fields) if is_call else None


def _wrapped(text: str, begin: int, end: int) -> tuple[int, int]:
    """Return the range of a call, extended by the code fence or the model's marker around the call."""
    window = text[max(0, begin - _WINDOW) : begin]
    before = _BEFORE.search(window)
    if before is None:
        return begin, end
    after = _AFTER.match(text, end) if before[0].startswith('```') else None
    return begin - len(before[0]), after.end() if after else end
