"""Curves in the terminal."""

import math
from collections.abc import Iterator, Sequence

from twinkle_client.metrics import MetricSeries

LINES = 8
"""Number of lines of a metric: its title, its curve and its steps."""
_WIDTH, _HEIGHT = 60, LINES - 2
POINTS = 2 * _WIDTH
"""Number of points that a curve can show."""
_DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bits of a Braille character by column and row of its dots."""
_BRAILLE = 0x2800


def curve_lines(name: str, series: MetricSeries, *, width: int) -> list[str]:
    """Return the lines of a metric: its last value, its curve, and the range of its values and steps.

    Args:
        name: Name of the metric.
        series: Points, at least one.
        width: Number of characters that a line may have.
    """
    finite = [value for value in series.values if math.isfinite(value)]
    labels = [''] * _HEIGHT
    if finite:
        labels[0], labels[-1] = f'{max(finite):.4g}', f'{min(finite):.4g}'
    margin = max(map(len, (*labels, 'step')))
    columns = max(min(_WIDTH, width - margin - 2), 8)
    drawn = curve(series.steps, series.values, width=columns, height=_HEIGHT)
    first, last = str(series.steps[0]), str(series.steps[-1])
    end = '' if first == last else f' {last:>{max(columns - len(first) - 1, 0)}}'
    return [
        f'{name}: {series.values[-1]:.6g} at step {series.steps[-1]}',
        *(f'{label:>{margin}} {line}' for label, line in zip(labels, drawn, strict=True)),
        f'{"step":>{margin}} {first}{end}',
    ]


def curve(steps: Sequence[int], values: Sequence[float], *, width: int, height: int) -> list[str]:
    """Return lines of Braille characters that show values over steps.

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
