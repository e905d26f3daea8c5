"""Runs of one unit are found wherever they stand, and nothing else is."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.preprocessor.quality.repetition import find_run

LEAST, REPEATS = 24, 8


def has_run(text: str) -> bool:
    """Return whether there is a run, by looking at every place and period."""
    for period in range(1, len(text) // REPEATS + 1):
        length = 0
        for place in range(period, len(text)):
            length = length + 1 if text[place] == text[place - period] else 0
            if length and length + period >= max(LEAST, REPEATS * period):
                return True
    return False


@settings(max_examples=150, deadline=None)
@given(st.text(alphabet='ab', max_size=150))
def test_a_run_is_found_if_and_only_if_there_is_one(text: str) -> None:
    """As slow and plain a search finds the same."""
    assert (find_run(text, min_characters=LEAST, min_repeats=REPEATS) is not None) == has_run(text)


@settings(max_examples=150, deadline=None)
@given(
    st.text(alphabet='xyz ', max_size=80),
    st.text(alphabet='ab', min_size=1, max_size=30),
    st.integers(REPEATS, 2 * REPEATS),
    st.text(alphabet='xyz ', max_size=80),
)
def test_a_run_is_found_wherever_it_stands(before: str, unit: str, repeats: int, behind: str) -> None:
    """At the beginning, at the end or between; where it is said to be, the text does repeat itself."""
    text = before + unit * max(repeats, -(-LEAST // len(unit))) + behind
    run = find_run(text, min_characters=LEAST, min_repeats=REPEATS)
    assert run is not None
    assert run.repeats >= REPEATS
    assert run.end - run.begin >= LEAST
    assert text[run.begin : run.end - run.period] == text[run.begin + run.period : run.end]
