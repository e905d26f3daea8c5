"""Parsers of tool calls in model output. One format per file; the registry maps names to parsers."""

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
