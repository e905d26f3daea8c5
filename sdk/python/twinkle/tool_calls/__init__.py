"""Parsers of tool calls in model output, one format per file, for complete texts and for streams."""

from twinkle.tool_calls.found_call import FoundCall, StreamedParser, ToolCallParser, calls_of, text_without
from twinkle.tool_calls.hermes import HermesQwenParser
from twinkle.tool_calls.plain_json import JsonParser
from twinkle.tool_calls.react import ReActParser
from twinkle.tool_calls.stream import ToolCallStream

__all__ = [
    'FoundCall',
    'HermesQwenParser',
    'JsonParser',
    'ReActParser',
    'StreamedParser',
    'ToolCallParser',
    'ToolCallStream',
    'calls_of',
    'text_without',
]
