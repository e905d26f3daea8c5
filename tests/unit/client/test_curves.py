"""Tests of the curves that commands draw in the terminal."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_client.cli.curves import curve

BLANK = '\u2800'


def test_a_falling_line_goes_from_the_upper_left_to_the_lower_right() -> None:
    """The first value is in the upper left corner, and the last value in the lower right corner."""
    first, *middle, last = curve(range(10), range(10, 0, -1), width=8, height=4)
    assert first[0] != BLANK
    assert last[-1] != BLANK
    assert first[-1] == last[0] == BLANK
    assert all(line.strip(BLANK) for line in middle)


def test_distant_points_are_connected() -> None:
    """A line through all columns connects two points with the same value."""
    (line,) = curve([0, 1000], [1.0, 1.0], width=20, height=1)
    assert BLANK not in line


def test_values_that_are_not_finite_leave_a_gap() -> None:
    """NaN interrupts a line, and infinities do not change its scale."""
    (line,) = curve(range(5), [1.0, 1.0, math.nan, 1.0, 1.0], width=10, height=1)
    assert BLANK in line.strip(BLANK)
    assert curve(range(3), [0.0, 1.0, math.inf], width=9, height=2) != curve(
        range(3), [0.0, 1.0, 2.0], width=9, height=2
    )


@pytest.mark.parametrize('values', [[], [math.nan], [math.inf, -math.inf]])
def test_nothing_is_drawn_without_finite_values(values: list[float]) -> None:
    """A metric without finite values is shown as empty lines."""
    assert curve(range(len(values)), values, width=5, height=2) == [' ' * 5] * 2


def test_the_smallest_differences_are_drawn() -> None:
    """Values that differ by the smallest float64, and the largest values, are at the top and the bottom."""
    for values in ([0.0, 5e-324], [1.5e-323, 2e-323], [-1.7e308, 1.7e308]):
        first, last = curve([0, 1], values, width=4, height=2)
        assert first[-1] != BLANK
        assert last[0] != BLANK


@given(
    st.dictionaries(st.integers(0, 2**53 - 1), st.floats(), min_size=1, max_size=20),
    st.integers(1, 30),
    st.integers(1, 8),
)
def test_every_curve_fits_into_its_size(points: dict[int, float], width: int, height: int) -> None:
    """Any steps and values give lines of the requested size."""
    lines = curve(sorted(points), [points[step] for step in sorted(points)], width=width, height=height)
    assert [len(line) for line in lines] == [width] * height
