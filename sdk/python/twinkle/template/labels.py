"""Find which text of a rendered chat the assistant wrote, and label its tokens.

Where a template marks it (`{% generation %}`) the marks are taken. Elsewhere each turn is
found by rounds: it begins where the chat before it, rendered with a generation prompt,
ends, and ends where the rendering no longer changes when the turn's content does.
"""

from collections.abc import Callable, Collection, Sequence

import numpy as np
import numpy.typing as npt

from twinkle.data_format import IGNORE_INDEX
from twinkle.template.chat_template import Chat
from twinkle.template.errors import TemplateError

Span = tuple[int, int]
"""Characters `[begin, end)` of the rendered chat."""

IntVector = npt.NDArray[np.int32]

# Characters of no meaning, of which one that a chat does not hold marks a place in it.
_PRIVATE_USE = range(0xF5A02, 0x10FFFE)


def assistant_spans(
    messages: Chat, full: str, *, render: Callable[..., str], special_texts: Collection[str]
) -> list[Span]:
    """Return the spans of `full` that the assistant produced, its end-of-turn tokens included.

    Args:
        messages: the chat.
        full: its rendering.
        render: `render(messages, add_generation_prompt=...)`, as `full` was rendered.
        special_texts: special tokens; the one right behind a turn ends it.
    """
    spans: list[Span] = []
    probe = _probe(full)
    for index, message in enumerate(messages):
        if message['role'] != 'assistant':
            continue
        span = _turn_span(messages, index, full, render=render, probe=probe)
        if span is not None:
            spans.append((span[0], _with_turn_end(full, span[1], special_texts)))
    return spans


def _probe(full: str) -> str:
    """Return a text that differs from whatever is said at its first and at its last character."""
    used = set(full)
    free = next((chr(code) for code in _PRIVATE_USE if chr(code) not in used), None)
    if free is None:
        raise TemplateError('the chat holds every private-use character; leave some out')
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
        # Some templates refuse a chat that ends there; the content alone is then what is labelled.
        opening = ''
    # What a template puts between its generation prompt and the content (an empty thought, a space)
    # is the assistant's too.
    if opening and full.startswith(opening):
        begin = len(opening)
    return (begin, max(begin, end))


def _with_turn_end(full: str, end: int, special_texts: Collection[str]) -> int:
    lengths = (len(text) for text in special_texts if text and full.startswith(text, end))
    return end + max(lengths, default=0)


def _common_prefix_length(first: str, second: str) -> int:
    # Halving compares slices in C; going character by character costs milliseconds on long chats.
    low, high = 0, min(len(first), len(second))
    while low < high:
        middle = (low + high + 1) // 2
        if first[low:middle] == second[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def label_tokens(token_ids: Sequence[int], offsets: Sequence[Span], spans: Sequence[Span]) -> IntVector:
    """Return int32 [T]: the token's own id where it begins inside a span, else `IGNORE_INDEX`. Not shifted."""
    ids = np.asarray(token_ids, dtype=np.int32)
    if not len(spans):
        return np.full(len(ids), IGNORE_INDEX, dtype=np.int32)
    places = np.asarray(offsets, dtype=np.int64).reshape(-1, 2)[:, 0]
    begins, ends = np.asarray(sorted(spans), dtype=np.int64).T
    # A place is inside some span if any that begins at or before it ends behind it.
    furthest = np.append(0, np.maximum.accumulate(ends))
    is_labelled = places < furthest[np.searchsorted(begins, places, side='right')]
    return np.where(is_labelled, ids, np.int32(IGNORE_INDEX))


def shift_labels(labels: IntVector) -> IntVector:
    """Return int32 [T] with `shifted[t] == labels[t + 1]`; the last is `IGNORE_INDEX`."""
    return np.append(labels[1:], np.int32(IGNORE_INDEX))
