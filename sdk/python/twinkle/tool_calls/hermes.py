"""Tool calls inside `<tool_call>` tags: a JSON object (Hermes, Qwen) or one tag per argument (Qwen3.5)."""

import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, cast

from twinkle.data_format import Tool
from twinkle.tool_calls.found_call import FoundCall, name_and_arguments, partial_marker
from twinkle.tool_calls.json_value import may_grow, read_json, value_end

_OPEN, _CLOSE = '<tool_call>', '</tool_call>'
_START = re.compile(r'<tool_call>\s*+(?=\{|<function=)')
_UNKNOWN_START = re.compile(r'<tool_call>\s*+(?:<(?:f(?:u(?:n(?:c(?:t(?:i(?:o(?:n)?)?)?)?)?)?)?)?)?\Z')
"""A tag whose body is empty so far, or too short to show its kind."""
_BLANKS = re.compile(r'\s*+')
_FINISH = re.compile(r'\s*+</tool_call>')
_FUNCTION = re.compile(r'<function=([^<>\n]++)>')
_PARAMETER = re.compile(r'\s*+<parameter=([^<>\n]++)>')
_FUNCTION_END, _PARAMETER_END = '</function>', '</parameter>'


class HermesQwenParser:
    """Parser of `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, and of the same tag with `<function=...>`.

    JSON strings may contain the tags. The Qwen3.5 format has no escape sequences, so its values cannot contain
    the tags. Its values are strings unless the tool declares another type.
    """

    name = 'hermes'

    def find(self, text: str, tools: Sequence[Tool]) -> Iterator[FoundCall]:
        """Yield the complete calls in `text`.

        The time is linear, because each character is read at most twice. An attempt to read a JSON body ends at the
        next tag outside a string. Two attempts therefore read the same text only if the text is inside a string in one
        attempt. For a body of tags, only the first and the last opening tag before a closing tag are tried.
        """
        position, closing, tried = 0, -1, -1
        while start := _START.search(text, position):
            position = begin = start.end()
            if closing < begin:
                closing = text.find(_CLOSE, begin)
            if closing < 0:
                return
            if text[begin] == '{':
                call = _json_call(text, start)
            elif tried != closing or text.find(_OPEN, begin, closing) < 0:
                tried = closing
                call = _tagged_call(text, start, closing, tools)
            else:
                continue
            if call is not None:
                position = call.end
                yield call

    def pending(self, text: str) -> int:
        """Return the index of the first tag whose call may still be completed; see `StreamedParser`."""
        position, last_closing = 0, text.rfind(_CLOSE)
        while start := _START.search(text, position):
            position = start.end()
            if _may_continue(text, start, last_closing):
                return start.start()
        unknown = _UNKNOWN_START.search(text, position)
        return unknown.start() if unknown else max(position, partial_marker(text, _OPEN))


def _may_continue(text: str, start: re.Match[str], last_closing: int) -> bool:
    """Return whether later text may complete a call; the last closing tag of the text begins at `last_closing`."""
    if text[start.end()] != '{':
        return last_closing < start.end()
    end, is_closed = value_end(text, start.end())
    if not is_closed:
        return may_grow(text, end)
    begin = _BLANKS.match(text, end).end()  # pyright: ignore[reportOptionalMemberAccess] (always matches)
    rest = text[begin : begin + len(_CLOSE)]
    return rest != _CLOSE and _CLOSE.startswith(rest)


def _json_call(text: str, start: re.Match[str]) -> FoundCall | None:
    end, is_closed = value_end(text, start.end())
    finish = _FINISH.match(text, end) if is_closed else None
    if finish is None:
        return None
    try:
        called = name_and_arguments(read_json(text[start.end() : end]))
    except ValueError:
        return None
    return FoundCall(start.start(), finish.end(), *called) if called else None


def _tagged_call(text: str, start: re.Match[str], closing: int, tools: Sequence[Tool]) -> FoundCall | None:
    body = text[start.end() : closing].rstrip()
    head = _FUNCTION.match(body)
    if head is None or not body.endswith(_FUNCTION_END):
        return None
    texts = _parameters(body[head.end() : -len(_FUNCTION_END)])
    if texts is None:
        return None
    types = _declared_types(head[1], tools)
    arguments = {name: _typed(value, types.get(name, ())) for name, value in texts.items()}
    return FoundCall(start.start(), closing + len(_CLOSE), head[1], arguments)


def _parameters(inner: str) -> dict[str, str] | None:
    """Return the arguments as strings by name, or None if there is other text between them."""
    texts: dict[str, str] = {}
    position = 0
    while head := _PARAMETER.match(inner, position):
        end = inner.find(_PARAMETER_END, head.end())
        if end < 0:
            return None
        # The format puts a newline before and after each value.
        texts[head[1]] = inner[head.end() : end].removeprefix('\n').removesuffix('\n')
        position = end + len(_PARAMETER_END)
    return None if inner[position:].strip() else texts


def _declared_types(name: str, tools: Sequence[Tool]) -> dict[str, tuple[str, ...]]:
    """Return the declared JSON types of a tool's parameters; undeclared parameters are missing or have no types."""
    for tool in tools:
        function = _fields(tool.get('function'))
        if function.get('name') == name:
            properties = _fields(_fields(function.get('parameters')).get('properties'))
            return {key: _types(_fields(schema).get('type')) for key, schema in properties.items()}
    return {}


def _fields(value: Any) -> Mapping[str, Any]:
    return cast('Mapping[str, Any]', value) if isinstance(value, Mapping) else {}


def _types(declared: Any) -> tuple[str, ...]:
    if isinstance(declared, str):
        return (declared,)
    return tuple(cast('list[str]', declared)) if isinstance(declared, list) else ()


def _typed(text: str, types: tuple[str, ...]) -> Any:
    """Return an argument's value; text that is not valid JSON stays a string, so that the tool can refuse it."""
    if not types or 'string' in types:
        return text
    # Chat templates write booleans and null in Python's notation.
    json_text = text.lower() if text in {'True', 'False'} else 'null' if text == 'None' else text
    try:
        return read_json(json_text)
    except ValueError:
        return text
