"""What every style of tool calls shares: a found call, the seam of a parser, and what is made of its findings."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, cast

from twinkle.data_format import Tool, ToolCall
from twinkle.template.tool_calls.json_value import read_json


@dataclass(frozen=True)
class FoundCall:
    """One call and the characters `[begin, end)` of the text that make it."""

    begin: int
    end: int
    name: str
    """Of the tool; not empty."""
    arguments: dict[str, Any]


class ToolCallParser(Protocol):
    """One style of writing calls.

    Concurrency: safe to share between threads.
    """

    @property
    def name(self) -> str:
        """What a registry and the option `tool_call_parser` know the style by."""
        ...

    def find(self, text: str, tools: Sequence[Tool]) -> Iterable[FoundCall]:
        """Return the whole, well-formed calls of `text`, in order and without overlap.

        Takes any text, in time linear in its length, and raises nothing: a half call is no call.

        Args:
            tools: those the model was offered, for styles that do not say what type a value has.
        """
        ...


def calls_of(found: Iterable[FoundCall]) -> list[ToolCall]:
    """Return calls as messages hold them; their ids count within the text."""
    return [
        # Nine letters and digits: the only form that Mistral's chat templates take, and any other takes it too.
        ToolCall(id=f'call{place:05d}', type='function', function={'name': call.name, 'arguments': call.arguments})
        for place, call in enumerate(found)
    ]


def text_without(text: str, found: Iterable[FoundCall]) -> str:
    """Return `text` without its calls, without blanks at its ends; as it is where there are none."""
    pieces: list[str] = []
    position = 0
    for call in found:
        pieces.append(text[position : call.begin])
        position = call.end
    return ''.join([*pieces, text[position:]]).strip() if pieces else text


def name_and_arguments(value: Any) -> tuple[str, dict[str, Any]] | None:
    """Return what a JSON value calls, None where it calls nothing.

    `arguments` (Llama: `parameters`) may be missing, or be an object written as a string.
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
