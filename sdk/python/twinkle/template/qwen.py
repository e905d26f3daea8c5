"""Template for Qwen models."""

from typing import Unpack

from twinkle.template.base import Template, TemplateOptions


class Qwen3_5Template(Template):  # noqa: N801 - public name, follows the model family
    """Template for Qwen3 and Qwen3.5 chats; `docs/templates.md` lists the models whose images and videos are supported.

    The model's own chat template defines the format of tools, thinking and turns. This class differs from `Template`
    only in its default tool call parser, which is 'hermes' for any chat template. The generation prompt of Qwen3.5
    opens the thought, so a sampled turn contains only the closing tag; such a turn can be passed back as a message. The
    chat template omits the thinking of turns before the last user message, and such thinking therefore has no labels.
    """

    def __init__(self, model_id: str, **options: Unpack[TemplateOptions]) -> None:
        options.setdefault('tool_call_parser', 'hermes')
        super().__init__(model_id, **options)
