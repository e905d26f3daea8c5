"""Search for repetitions of one unit in a text, in time linear in the length of the text."""

from collections import Counter
from dataclasses import dataclass

_BLOCK = 4096
"""Characters compared at once when a run is extended."""
_MAX_TRIES = 16
"""Maximum number of candidate periods per window. A window with more candidates consists of repeats of a unit that a
smaller window finds."""


@dataclass(frozen=True)
class Run:
    """A part of a text that consists of repeats of one unit."""

    begin: int
    """Index of the first character."""
    end: int
    """Index after the last character."""
    period: int
    """Length of the unit in characters."""

    @property
    def repeats(self) -> int:
        """Number of complete repeats of the unit."""
        return (self.end - self.begin) // self.period


def find_run(text: str, *, min_characters: int, min_repeats: int) -> Run | None:
    """Return a run with at least `min_characters` characters and `min_repeats` repeats, or None.

    Every such run covers an aligned window of half the minimum length. The function therefore checks aligned windows,
    and extends the run to both sides if a window is periodic. The size of the windows doubles to find longer units.
    Units with at least eight repeats are always found; units with fewer repeats may be missed.
    """
    for window in _window_sizes(len(text), min_characters):
        run = _find_in_windows(text, window, min_characters, min_repeats)
        if run is not None:
            return run
    return None


def repeated_line(text: str, *, min_characters: int, min_repeats: int, max_share: float) -> tuple[str, int] | None:
    """Return the most frequent line of a text and its count, or None if the line does not reach the thresholds."""
    lines = [line.strip() for line in text.splitlines()]
    counts = Counter(line for line in lines if line)
    if not counts:
        return None
    line, count = counts.most_common(1)[0]
    is_repeated = count >= min_repeats and count * len(line) >= min_characters
    return (line, count) if is_repeated and count > max_share * counts.total() else None


def _window_sizes(length: int, min_characters: int) -> list[int]:
    """Return half the minimum length and its doubles, as long as a run of twice the window fits into the text."""
    sizes = [max(2, min_characters // 2)]
    while 4 * sizes[-1] <= length:
        sizes.append(2 * sizes[-1])
    return sizes


def _find_in_windows(text: str, window: int, min_characters: int, min_repeats: int) -> Run | None:
    seen_until = 0
    for begin in range(0, len(text) - window + 1, window):
        if begin + window <= seen_until:
            continue
        period = _period(text[begin : begin + window])
        if period is None:
            continue
        run = Run(_extend_left(text, begin, period), _extend_right(text, begin + window, period), period)
        if run.end - run.begin >= min_characters and run.repeats >= min_repeats:
            return run
        seen_until = run.end
    return None


def _period(part: str) -> int | None:
    """Return the smallest period that is at most half the length of the part, or None."""
    half = len(part) // 2
    head = part[: len(part) - half]
    at = 0
    for _ in range(_MAX_TRIES):
        at = part.find(head, at + 1)
        if at == -1 or part.startswith(part[at:]):
            break
    else:
        return None
    return at if at != -1 else None


def _extend_right(text: str, end: int, period: int) -> int:
    """Return the end of the run that reaches at least to `end`."""
    while end < len(text):
        ahead, behind = text[end : end + _BLOCK], text[end - period : end - period + _BLOCK]
        same = _common_prefix_length(ahead, behind)
        end += same
        if same < len(ahead):
            break
    return end


def _extend_left(text: str, begin: int, period: int) -> int:
    """Return the beginning of the run that starts at or before `begin`."""
    while begin > 0:
        low = max(0, begin - _BLOCK)
        behind, ahead = text[low:begin][::-1], text[low + period : begin + period][::-1]
        same = _common_prefix_length(behind, ahead)
        begin -= same
        if same < len(behind):
            break
    return begin


def _common_prefix_length(one: str, other: str) -> int:
    """Return the length of the common prefix of two texts."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
