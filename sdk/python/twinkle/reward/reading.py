"""Extraction of the completion from a trajectory, and of the answer from a completion."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.reward.errors import InvalidRewardInput


def completion_of(trajectory: Mapping[str, Any], index: int = 0) -> str:
    """Return the text of the last assistant turn, with its thinking in `<think>` tags; '' if there is no such turn.

    Args:
        trajectory: a trajectory, or a feature with `messages`.
        index: index of the trajectory, for error messages.

    Raises:
        InvalidRewardInput: the trajectory has no `messages`.
    """
    messages: Any = trajectory.get('messages') if isinstance(cast(Any, trajectory), Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRewardInput(f'trajectories[{index}].messages', 'is missing; pass the chat with its completion')
    for message in reversed(cast('Sequence[Any]', messages)):
        if isinstance(message, Mapping) and cast('Mapping[str, Any]', message).get('role') == 'assistant':
            turn = cast('Mapping[str, Any]', message)
            thought, text = turn.get('reasoning_content'), _text_of(turn.get('content'))
            return f'<think>{thought}</think>{text}' if thought else text
    return ''


def after_thinking(completion: str) -> str:
    """Return the text after the last `</think>`, or all text if there is no such tag, up to the next `<think>`.

    A thought that begins at this `<think>` is not closed, so it is not part of the result.
    """
    return completion.rpartition('</think>')[2].partition('<think>')[0]


def tagged(completion: str, tag: str) -> str | None:
    """Return the stripped content of the last `<tag>...</tag>`, or None if the tags do not occur."""
    begin, end = f'<{tag}>', f'</{tag}>'
    close = completion.rfind(end)
    start = completion.rfind(begin, 0, close) if close >= 0 else -1
    return completion[start + len(begin) : close].strip() if start >= 0 else None


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = cast('Sequence[Any]', content if isinstance(content, Sequence) else ())
    return ''.join(str(cast('Mapping[str, Any]', part).get('text', '')) for part in parts if isinstance(part, Mapping))
