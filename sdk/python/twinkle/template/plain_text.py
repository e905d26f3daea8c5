"""Plain text: trajectories that are encoded without the chat template."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.template.chat_template import RenderedChat
from twinkle.template.labels import Span, has_labels


def is_text(trajectory: Mapping[str, Any]) -> bool:
    """Return whether a trajectory is plain text, which is encoded without the chat template."""
    return trajectory.get('use_chat_template') is False


def joined_texts(messages: Sequence[Mapping[str, Any]], *, begin: str = '', end: str = '') -> RenderedChat:
    """Concatenate the contents of the messages; the spans cover the contents of the assistant's messages.

    Args:
        messages: the messages of the trajectory; at least one.
        begin: text to insert before the first message if the message does not already begin with it.
        end: text to append to the last message if it is the assistant's and does not already end with it.
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
