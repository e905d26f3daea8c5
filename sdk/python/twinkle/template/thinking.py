"""Convert an assistant's thinking between two representations: part of the content, and `reasoning_content`."""

from typing import Any

THINK_OPEN, THINK_CLOSE = '<think>', '</think>'


def with_thinking(message: dict[str, Any], *, has_reasoning_field: bool, is_opened: bool = False) -> dict[str, Any]:
    """Return a message with its thinking in the field that the chat template reads; other roles are unchanged.

    Args:
        message: the message.
        has_reasoning_field: True if the template reads `reasoning_content`; False if the thinking is inside `<think>`
            tags at the beginning of the content.
        is_opened: whether the generation prompt opens the thought, so that sampled text begins inside it.
    """
    if message['role'] != 'assistant':
        return message
    content: str = message['content']
    reasoning: str = message.get('reasoning_content', '')
    others = {name: value for name, value in message.items() if name != 'reasoning_content'}
    found = thought(content, is_opened=is_opened) if has_reasoning_field and not reasoning else None
    if found and content.endswith(THINK_CLOSE, *found):
        begin, end = found
        reasoning = content[begin : end - len(THINK_CLOSE)].strip('\n')
        return {**others, 'content': content[end:].lstrip('\n'), 'reasoning_content': reasoning}
    if not has_reasoning_field and reasoning:
        return {**others, 'content': f'{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{content}'}
    return message


def thought(content: str, *, is_opened: bool) -> tuple[int, int] | None:
    """Return the character range `[begin, end)` of the thought at the beginning of `content`, or None.

    The range includes the closing tag. A thought that begins with `<think>` and is not closed extends to the end of the
    content.

    Args:
        content: text of the assistant.
        is_opened: whether the prompt contains the opening tag, so that a closing tag alone ends a thought.
    """
    blanks = len(content) - len(content.lstrip())
    close = content.find(THINK_CLOSE)
    end = close + len(THINK_CLOSE) if close >= 0 else len(content)
    if content.startswith(THINK_OPEN, blanks):
        return blanks + len(THINK_OPEN), end
    return (0, end) if is_opened and close >= 0 else None
