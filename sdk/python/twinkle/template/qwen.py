"""Qwen models."""

from twinkle.template.base import Template


class Qwen3_5Template(Template):  # noqa: N801 - the name users type
    """Template of Qwen3 and Qwen3.5 chats.

    Their chat template knows tools and thinking, and drops the thinking of earlier turns; text
    only for now. Everything it needs is in the model's own chat template, so it differs from
    `Template` in name alone.
    """
