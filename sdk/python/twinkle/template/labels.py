"""Find the assistant's text in a rendered chat and label its tokens.

If the chat template marks the assistant's text (`{% generation %}`), the marks are used. Otherwise each turn is found
by rendering the chat twice more. The turn begins where the preceding chat, rendered with a generation prompt, ends. To
find the end, the content of the turn is replaced: the turn ends where both renderings are equal again.
"""

from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX
from twinkle.template.chat_template import Chat
from twinkle.template.errors import TemplateError

Span = tuple[int, int]
"""Character range `[begin, end)` of the rendered chat."""

IntVector = npt.NDArray[np.int32]

# Private-use characters. A character that does not occur in the chat is used as the probe.
_PRIVATE_USE = range(0xF5A02, 0x10FFFE)


def assistant_spans(
    messages: Chat, full: str, *, render: Callable[..., str], special_texts: Collection[str]
) -> list[Span]:
    """Return the spans of `full` that the assistant wrote, including end-of-turn tokens, in order.

    Messages with the weight 0 are left out.

    Args:
        messages: the chat.
        full: the rendered chat.
        render: `render(messages, add_generation_prompt=...)`, the function that rendered `full`.
        special_texts: the special tokens as strings; a special token directly after a turn is its end-of-turn token.

    Raises:
        TemplateError: the chat contains every private-use character, or rendering a changed chat fails.
    """
    spans: list[Span] = []
    probe = _probe(full)
    for index, message in enumerate(messages):
        if not has_labels(message):
            continue
        span = _turn_span(messages, index, full, render=render, probe=probe)
        if span is not None:
            spans.append((span[0], _with_turn_end(full, span[1], special_texts)))
    return spans


def has_labels(message: Mapping[str, Any]) -> bool:
    """Return whether a message is trained on: it is written by the assistant, and its weight is not 0."""
    return message['role'] == 'assistant' and message.get('weight') != 0


def _probe(full: str) -> str:
    """Return a character that does not occur in `full`, to replace the content of a turn."""
    used = set(full)
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise TemplateError('the chat contains every private-use character; remove some of them')
    return free


def _turn_span(messages: Chat, index: int, full: str, *, render: Callable[..., str], probe: str) -> Span | None:
    turn = {'role': 'assistant', 'content': probe}
    changed = render([*messages[:index], turn, *messages[index + 1 :]], add_generation_prompt=False)
    if probe not in changed:
        return None
    begin = _common_prefix_length(full, changed)
    end = len(full) - _common_prefix_length(full[::-1], changed[::-1])
    try:
        opening = render(messages[:index], add_generation_prompt=True)
    except TemplateError:
        # Some templates refuse a chat that ends before this message; only the content is labelled then.
        opening = ''
    # Text between the generation prompt and the content (an empty thought, a space) is labelled too.
    if opening and full.startswith(opening):
        begin = len(opening)
    return (begin, max(begin, end))


def _with_turn_end(full: str, end: int, special_texts: Collection[str]) -> int:
    lengths = (len(text) for text in special_texts if text and full.startswith(text, end))
    return end + max(lengths, default=0)


def _common_prefix_length(first: str, second: str) -> int:
    # Bisection compares slices in C; a loop over characters takes milliseconds for long chats.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def label_tokens(token_ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> IntVector:
    """Return unshifted labels, int32 [T]: the token's id if the token begins inside a span, else `IGNORE_INDEX`."""
    ids = np.asarray(token_ids, dtype=np.int32)
    if not len(spans):
        return np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    starts = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
    begins, ends = np.asarray(sorted(spans), dtype=np.int64).T
    # A token is labelled if a span begins at or before the start of the token and ends after the start of the token.
    furthest = np.append(0, np.maximum.accumulate(ends))
    is_labelled = starts < furthest[np.searchsorted(begins, starts, side='right')]
    return np.where(is_labelled, ids, np.int32(IGNORE_INDEX))


def shift_labels(labels: IntVector) -> IntVector:
    """Return int32 [T] with `shifted[t] == labels[t + 1]`; the last label is `IGNORE_INDEX`."""
    return np.append(labels[1:], np.int32(IGNORE_INDEX))
