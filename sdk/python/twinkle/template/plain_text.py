"""Texts that are encoded without the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.template.chat_template import RenderedChat
from twinkle.template.labels import Span, has_labels


def is_text(trajectory: Mapping[str, Any]) -> bool:
    """Return whether a trajectory is a text, which is encoded without the chat template."""
    return trajectory.get('use_chat_template') is False


def joined_texts(messages: Sequence[Mapping[str, Any]], *, begin: str = '', end: str = '') -> RenderedChat:
    """Concatenate the texts of the messages; the spans are the assistant's texts.

    Args:
        messages: the messages.
        begin: text before the first message, unless the message begins with it.
        end: text that is part of a last message of the assistant, unless the message ends with it.
    """
    texts = [str(message.get('content', '')) for message in messages]
    if messages[-1].get('role') == 'assistant' and not texts[-1].endswith(end):
        texts[-1] += end
    if not texts[0].startswith(begin):
        texts.insert(0, begin)
    shift = len(texts) - len(messages)
    spans: list[Span] = []
    for index, message in enumerate(messages, start=shift):
        if has_labels(message):
            position = sum(map(len, texts[:index]))
            spans.append((position, position + len(texts[index])))
    return RenderedChat(''.join(texts), tuple(spans))
