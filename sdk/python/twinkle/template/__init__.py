"""Chats to tokens and back, as the model's own tokenizer and chat template say. Loads no torch."""

from twinkle.template.base import EncodedChat, Template, TemplateOptions, TruncationStrategy
from twinkle.template.errors import ExampleTooLong, InvalidTrajectory, TemplateError, UnknownTemplate
from twinkle.template.qwen import Qwen3_5Template
from twinkle.template.registry import build_template, template_names
from twinkle.template.tokenizer import ChatTokenizer

__all__ = [
    'ChatTokenizer',
    'EncodedChat',
    'ExampleTooLong',
    'InvalidTrajectory',
    'Qwen3_5Template',
    'Template',
    'TemplateError',
    'TemplateOptions',
    'TruncationStrategy',
    'UnknownTemplate',
    'build_template',
    'template_names',
]
