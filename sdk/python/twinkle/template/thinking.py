"""Where an assistant's thinking is: in front of what it says, or in a field of its own."""

from typing import Any

THINK_OPEN, THINK_CLOSE = '<think>', '</think>'


def with_thinking(message: dict[str, Any], *, is_kept_apart: bool, is_opened: bool = False) -> dict[str, Any]:
    """Return an assistant's message with its thinking where the chat template looks for it.

    Args:
        is_kept_apart: True: in `reasoning_content`; False: within `<think>` at the content's beginning.
        is_opened: the generation prompt opens the thought, so that sampled text begins within it.
    """
    if message['role'] != 'assistant':
        return message
    content: str = message['content']
    reasoning: str = message.get('reasoning_content', '')
    others = {name: value for name, value in message.items() if name != 'reasoning_content'}
    found = thought(content, is_opened=is_opened) if is_kept_apart and not reasoning else None
    if found and content.endswith(THINK_CLOSE, *found):
        begin, end = found
        reasoning = content[begin : end - len(THINK_CLOSE)].strip('\n')
        return {**others, 'content': content[end:].lstrip('\n'), 'reasoning_content': reasoning}
    if not is_kept_apart and reasoning:
        return {**others, 'content': f'{THINK_OPEN}\n{reasoning}\n{THINK_CLOSE}\n\n{content}'}
    return message


def thought(content: str, *, is_opened: bool) -> tuple[int, int] | None:
    """Return the characters `[begin, end)` of the thought that `content` begins with, its closing tag included.

    One that is not closed goes on to the end of the content; None where there is no thought.

    Args:
        is_opened: the opening tag was in the prompt, so that a closing tag alone ends a thought.
    """
    blanks = len(content) - len(content.lstrip())
    close = content.find(THINK_CLOSE)
    end = close + len(THINK_CLOSE) if close >= 0 else len(content)
    if content.startswith(THINK_OPEN, blanks):
        return blanks + len(THINK_OPEN), end
    return (0, end) if is_opened and close >= 0 else None
