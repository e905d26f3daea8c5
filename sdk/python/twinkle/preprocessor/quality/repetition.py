"""Where a text goes round in circles: runs of one unit, found in time linear in the text's length."""

from collections import Counter
from dataclasses import dataclass

_BLOCK = 4096
"""Characters compared at once when a run is followed."""
_MOST_TRIES = 16
"""Beginnings of a unit tried in one window. More of them means more repeats, which a smaller window has found."""


@dataclass(frozen=True)
class Run:
    """Part of a text that repeats itself."""

    begin: int
    end: int
    period: int
    """Length of the unit, in characters."""

    @property
    def repeats(self) -> int:
        """How often the unit stands there in full."""
        return (self.end - self.begin) // self.period


def find_run(text: str, *, min_characters: int, min_repeats: int) -> Run | None:
    """Return the first run of at least so many characters and repeats of one unit, else None.

    Any such run covers a whole window of half its least length, aligned to that length; so windows are looked at one
    by one, and where one repeats itself its run is followed to both sides. Windows double in size for long units: every
    unit that repeats eight times is found; one that repeats less, where `min_repeats` allows it, may be missed.
    """
    for window in _window_sizes(len(text), min_characters):
        run = _find_in_windows(text, window, min_characters, min_repeats)
        if run is not None:
            return run
    return None


def repeated_line(text: str, *, min_characters: int, min_repeats: int, max_share: float) -> tuple[str, int] | None:
    """Return the line that most of a text consists of, and how often it stands there, else None."""
    lines = [line.strip() for line in text.splitlines()]
    counts = Counter(line for line in lines if line)
    if not counts:
        return None
    line, count = counts.most_common(1)[0]
    is_repeated = count >= min_repeats and count * len(line) >= min_characters
    return (line, count) if is_repeated and count > max_share * counts.total() else None


def _window_sizes(length: int, min_characters: int) -> list[int]:
    """Return half the least length and its doubles, as far as a run of double the window fits into the text."""
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
        run = Run(_follow_back(text, begin, period), _follow(text, begin + window, period), period)
        if run.end - run.begin >= min_characters and run.repeats >= min_repeats:
            return run
        seen_until = run.end
    return None


def _period(part: str) -> int | None:
    """Return the smallest period of at most half the part, else None."""
    half = len(part) // 2
    head = part[: len(part) - half]
    at = 0
    for _ in range(_MOST_TRIES):
        at = part.find(head, at + 1)
        if at == -1 or part.startswith(part[at:]):
            break
    else:
        return None
    return at if at != -1 else None


def _follow(text: str, end: int, period: int) -> int:
    """Return where the run stops that reaches at least to `end`."""
    while end < len(text):
        ahead, behind = text[end : end + _BLOCK], text[end - period : end - period + _BLOCK]
        same = _same_length(ahead, behind)
        end += same
        if same < len(ahead):
            break
    return end


def _follow_back(text: str, begin: int, period: int) -> int:
    """Return where the run starts that reaches at least back to `begin`."""
    while begin > 0:
        low = max(0, begin - _BLOCK)
        behind, ahead = text[low:begin][::-1], text[low + period : begin + period][::-1]
        same = _same_length(behind, ahead)
        begin -= same
        if same < len(behind):
            break
    return begin


def _same_length(one: str, other: str) -> int:
    """Return how long the common beginning of two texts is."""
    low, high = 0, min(len(one), len(other))
    while low < high:
        middle = (low + high + 1) // 2
        if one[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low
