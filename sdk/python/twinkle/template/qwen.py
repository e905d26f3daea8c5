"""Qwen models."""

from typing import Unpack

from twinkle.template.base import Template, TemplateOptions


class Qwen3_5Template(Template):  # noqa: N801 - the name users type
    """Template of Qwen3 and Qwen3.5 chats, and of images and videos where the model's are read (docs/templates.md).

    The model's own chat template says how tools, thinking and turns are written, so this one adds little to
    `Template`: calls of tools are looked for in Qwen's style, whatever the chat template shows. Qwen3.5's generation
    prompt opens the thought, so a sampled turn has a closing tag alone; fed back as a message it is taken apart all
    the same. The thinking of turns before the last question is not shown, and so not trained on.
    """

    def __init__(self, model_id: str, **options: Unpack[TemplateOptions]) -> None:
        options.setdefault('tool_call_parser', 'hermes')
        super().__init__(model_id, **options)
