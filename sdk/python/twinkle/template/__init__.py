"""Convert chats to tokens and back with the model's own tokenizer and chat template, without importing torch."""

from twinkle.template.base import EncodedChat, Template, TemplateOptions, TruncationStrategy
from twinkle.template.continuation import extend_positions
from twinkle.template.errors import (
    ExampleTooLong,
    InvalidFeature,
    InvalidTrajectory,
    TemplateError,
    UnknownTemplate,
    UnknownToolCallParser,
)
from twinkle.template.qwen import Qwen3_5Template
from twinkle.template.registry import build_template, template_names
from twinkle.template.tokenizer import ChatTokenizer
from twinkle.template.tool_call_registry import TOOL_CALL_PARSERS, ToolCallRegistry
from twinkle.tool_calls import FoundCall, ToolCallParser

__all__ = [
    'TOOL_CALL_PARSERS',
    'ChatTokenizer',
    'EncodedChat',
    'ExampleTooLong',
    'FoundCall',
    'InvalidFeature',
    'InvalidTrajectory',
    'Qwen3_5Template',
    'Template',
    'TemplateError',
    'TemplateOptions',
    'ToolCallParser',
    'ToolCallRegistry',
    'TruncationStrategy',
    'UnknownTemplate',
    'UnknownToolCallParser',
    'build_template',
    'extend_positions',
    'template_names',
]
