"""Styles of tool calls by name."""

from twinkle.template.errors import UnknownToolCallParser
from twinkle.template.tool_calls.hermes import HermesQwenParser
from twinkle.template.tool_calls.parser import ToolCallParser
from twinkle.template.tool_calls.plain_json import JsonParser
from twinkle.template.tool_calls.react import ReActParser


class ToolCallRegistry:
    """Parsers by the names users give."""

    def __init__(self, *parsers: ToolCallParser) -> None:
        """Hold `parsers`; more may be registered."""
        self._parsers: dict[str, ToolCallParser] = {}
        for parser in parsers:
            self.register(parser)

    def register(self, parser: ToolCallParser) -> None:
        """Add a parser under its name.

        Raises:
            ValueError: the name is taken.
        """
        if parser.name in self._parsers:
            raise ValueError(f'a tool call parser is registered as {parser.name!r}; give this one another name')
        self._parsers[parser.name] = parser

    def names(self) -> tuple[str, ...]:
        """Return the names `parser` takes, sorted."""
        return tuple(sorted(self._parsers))

    def parser(self, name: str) -> ToolCallParser:
        """Return the parser of this name.

        Raises:
            UnknownToolCallParser: none is registered under it.
        """
        if name not in self._parsers:
            known = ', '.join(self.names())
            raise UnknownToolCallParser(f'tool_call_parser: there is no parser {name!r}; there are {known}')
        return self._parsers[name]


TOOL_CALL_PARSERS = ToolCallRegistry(HermesQwenParser(), JsonParser(), ReActParser())
"""Those that the option `tool_call_parser` names; register your own here."""
