"""What rewards read of a completion: what the assistant said last, and the answer within it."""

from collections.abc import Mapping, Sequence
from typing import Any, cast

from twinkle.reward.errors import InvalidRewardInput


def completion_of(trajectory: Mapping[str, Any], index: int = 0) -> str:
    """Return what the assistant said last, its thinking before it in `<think>` tags; '' where it said nothing.

    Args:
        trajectory: or a feature, with the chat it was made from.
        index: of the trajectory, for messages.

    Raises:
        InvalidRewardInput: there is no chat.
    """
    messages: Any = trajectory.get('messages') if isinstance(cast(Any, trajectory), Mapping) else None
    if not isinstance(messages, Sequence) or isinstance(messages, str):
        raise InvalidRewardInput(f'trajectories[{index}].messages', 'is missing; give the chat with its completion')
    for message in reversed(cast('Sequence[Any]', messages)):
        if isinstance(message, Mapping) and cast('Mapping[str, Any]', message).get('role') == 'assistant':
            said = cast('Mapping[str, Any]', message)
            thought, text = said.get('reasoning_content'), _text_of(said.get('content'))
            return f'<think>{thought}</think>{text}' if thought else text
    return ''


def after_thinking(completion: str) -> str:
    """Return what stands behind the last `</think>`, or else the whole; a thought that never ends counts as none."""
    return completion.rpartition('</think>')[2].partition('<think>')[0]


def tagged(completion: str, tag: str) -> str | None:
    """Return what the last `<tag>` and the `</tag>` behind it enclose, without the space around it."""
    begin, end = f'<{tag}>', f'</{tag}>'
    close = completion.rfind(end)
    start = completion.rfind(begin, 0, close) if close >= 0 else -1
    return completion[start + len(begin) : close].strip() if start >= 0 else None


def _text_of(content: Any) -> str:
    if isinstance(content, str):
        return content
    parts = cast('Sequence[Any]', content if isinstance(content, Sequence) else ())
    return ''.join(str(cast('Mapping[str, Any]', part).get('text', '')) for part in parts if isinstance(part, Mapping))
