"""Registry of tool call parsers by name."""

from twinkle.template.errors import UnknownToolCallParser
from twinkle.tool_calls.found_call import ToolCallParser
from twinkle.tool_calls.hermes import HermesQwenParser
from twinkle.tool_calls.plain_json import JsonParser
from twinkle.tool_calls.react import ReActParser


class ToolCallRegistry:
    """A mutable mapping from names to tool call parsers.

    Args:
        parsers: parsers to register initially.
    """

    def __init__(self, *parsers: ToolCallParser) -> None:
        self._parsers: dict[str, ToolCallParser] = {}
        for parser in parsers:
            self.register(parser)

    def register(self, parser: ToolCallParser) -> None:
        """Add a parser under its `name`.

        Raises:
            ValueError: the name is already registered.
        """
        if parser.name in self._parsers:
            raise ValueError(f'tool call parser {parser.name!r} is already registered; choose another name')
        self._parsers[parser.name] = parser

    def names(self) -> tuple[str, ...]:
        """Return the registered names, sorted."""
        return tuple(sorted(self._parsers))

    def parser(self, name: str) -> ToolCallParser:
        """Return the parser with this name.

        Raises:
            UnknownToolCallParser: no parser is registered under the name.
        """
        if name not in self._parsers:
            known = ', '.join(self.names())
            raise UnknownToolCallParser(f'tool_call_parser: unknown parser {name!r}; use one of {known}')
        return self._parsers[name]


TOOL_CALL_PARSERS = ToolCallRegistry(HermesQwenParser(), JsonParser(), ReActParser())
"""The parsers that the option `tool_call_parser` accepts by name; register custom parsers here."""
