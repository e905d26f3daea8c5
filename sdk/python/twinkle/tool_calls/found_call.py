"""Types and functions shared by all tool call parsers: the found call, the parser protocol and conversions."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from twinkle.data_format import Tool, ToolCall
from twinkle.tool_calls.json_value import read_json


@dataclass(frozen=True)
class FoundCall:
    """One tool call and its character range `[begin, end)` in the text."""

    begin: int
    """Index of the first character."""
    end: int
    """Index after the last character."""
    name: str
    """Name of the tool; not empty."""
    arguments: dict[str, Any]
    """Arguments by name, as JSON values."""


class ToolCallParser(Protocol):
    """A parser of one format of tool calls.

    Concurrency: safe to share between threads.
    """

    @property
    def name(self) -> str:
        """Name in a registry, which the option `tool_call_parser` accepts."""
        ...

    def find(self, text: str, tools: Sequence[Tool]) -> Iterable[FoundCall]:
        """Return the complete, well-formed calls in `text`, in order and without overlap.

        Accepts any text, takes linear time and never raises; incomplete calls are ignored.

        Args:
            text: the sampled text.
            tools: the tools offered to the model, for formats that do not state the types of values.
        """
        ...


class StreamedParser(ToolCallParser, Protocol):
    """A parser that can also read a text while it grows."""

    def pending(self, text: str) -> int:
        """Return the index of the first character that may belong to a call that later text completes.

        The result is the length of the text if there is no such character. Accepts any text and takes linear time.
        """
        ...


def partial_marker(text: str, marker: str) -> int:
    """Return the index of an incomplete `marker` at the end of `text`; otherwise the length of `text`."""
    for length in range(min(len(marker) - 1, len(text)), 0, -1):
        if text.endswith(marker[:length]):
            return len(text) - length
    return len(text)


def calls_of(found: Iterable[FoundCall]) -> list[ToolCall]:
    """Return calls in the form of a message's `tool_calls`, with ids `call00000`, `call00001`, ..."""
    return [
        # Mistral's chat templates accept only ids of nine letters and digits; all other templates accept them too.
        ToolCall(id=f'call{index:05d}', type='function', function={'name': call.name, 'arguments': call.arguments})
        for index, call in enumerate(found)
    ]


def text_without(text: str, found: Iterable[FoundCall]) -> str:
    """Return `text` without its calls and without whitespace at its ends; unchanged if there are no calls."""
    pieces: list[str] = []
    position = 0
    for call in found:
        pieces.append(text[position : call.begin])
        position = call.end
    return ''.join([*pieces, text[position:]]).strip() if pieces else text


def name_and_arguments(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return the tool name and arguments of a JSON value, or None if it is not a call.

    `arguments` (Llama: `parameters`) may be missing, or be an object encoded as a JSON string.
    """
    if not isinstance(value, Mapping):
        return None
    fields = cast('Mapping[str, Any]', value)
    name, arguments = fields.get('name'), fields.get('arguments', fields.get('parameters', {}))
    if isinstance(arguments, str):
        try:
            arguments = read_json(arguments)
        except ValueError:
            return None
    if not isinstance(name, str) or not name or not isinstance(arguments, dict):
        return None
    return name, cast('dict[str, Any]', arguments)
