"""Calls of tools, found in what a model says. One style per file; the registry knows them by name."""

from twinkle.template.tool_calls.hermes import HermesQwenParser
from twinkle.template.tool_calls.parser import FoundCall, ToolCallParser, calls_of, text_without
from twinkle.template.tool_calls.plain_json import JsonParser
from twinkle.template.tool_calls.react import ReActParser
from twinkle.template.tool_calls.registry import TOOL_CALL_PARSERS, ToolCallRegistry

__all__ = [
    'TOOL_CALL_PARSERS',
    'FoundCall',
    'HermesQwenParser',
    'JsonParser',
    'ReActParser',
    'ToolCallParser',
    'ToolCallRegistry',
    'calls_of',
    'text_without',
]
