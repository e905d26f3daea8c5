"""Curves in the terminal."""

import math
from collections.abc import Iterator, Sequence

_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character by column and row of its dots."""
_BRAILLE = 0x2800


def curve(steps: Sequence[int], values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return lines of Braille characters that show finite values over steps.

    Args:
        steps: Ascending steps.
        values: Value at each step. Straight lines connect them; values that are not finite leave a gap.
        width: Number of characters in a line.
        height: Number of lines.
    """
    finite = [value for value in values if math.isfinite(value)]
    cells = [[0] * width for _ in range(height)]
    if not finite:
        return [' ' * width] * height
    low, high = min(finite), max(finite)
    # The difference of two large values can be infinite.
    scale = 1.0 if math.isfinite(high - low) else 0.5
    span = high * scale - low * scale
    columns, rows = 2 * width - 1, 4 * height - 1
    previous: tuple[int, int] | None = None
    for step, value in zip(steps, values, strict=True):
        if not math.isfinite(value):
            previous = None
            continue
        x = round((step - steps[0]) / max(steps[-1] - steps[0], 1) * columns)
        y = round((high * scale - value * scale) / span * rows) if span else rows
        for column, row in _line(previous or (x, y), (x, y)):
            cells[row // 4][column // 2] |= _DOTS[column % 2][row % 4]
        previous = (x, y)
    return [''.join(chr(_BRAILLE + cell) for cell in line) for line in cells]


def _line(begin: tuple[int, int], end: tuple[int, int]) -> Iterator[tuple[int, int]]:
    """Yield the dots of a straight line, column and row."""
    (x, y), (width, height) = begin, (end[0] - begin[0], end[1] - begin[1])
    count = max(width, abs(height), 1)
    for index in range(count + 1):
        yield x + round(width * index / count), y + round(height * index / count)
