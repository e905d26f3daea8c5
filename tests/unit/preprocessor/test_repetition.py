"""Runs of a repeated unit are found at every position, and no other texts are reported."""

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.preprocessor.quality.repetition import find_run

MIN_CHARACTERS, MIN_REPEATS = 24, 8


def has_run(text: str) -> bool:
    """Return whether the text has a run, by checking all positions and periods."""
    for period in range(1, len(text) // MIN_REPEATS + 1):
        length = 0
        for index in range(period, len(text)):
            length = length + 1 if text[index] == text[index - period] else 0
            if length and length + period >= max(MIN_CHARACTERS, MIN_REPEATS * period):
                return True
    return False


@settings(max_examples=150)
@given(st.text(alphabet='ab', max_size=150))
def test_runs_are_those_of_an_exhaustive_search(text: str) -> None:
    """The result equals that of an exhaustive search."""
    assert (find_run(text, min_characters=MIN_CHARACTERS, min_repeats=MIN_REPEATS) is not None) == has_run(text)


@settings(max_examples=150)
@given(
    st.text(alphabet='xyz ', max_size=80),
    st.text(alphabet='ab', min_size=1, max_size=30),
    st.integers(MIN_REPEATS, 2 * MIN_REPEATS),
    st.text(alphabet='xyz ', max_size=80),
)
def test_a_run_is_found_at_every_position(before: str, unit: str, repeats: int, after: str) -> None:
    """A run is found at the beginning, in the middle and at the end, and its range is periodic."""
    text = before + unit * max(repeats, -(-MIN_CHARACTERS // len(unit))) + after
    run = find_run(text, min_characters=MIN_CHARACTERS, min_repeats=MIN_REPEATS)
    assert run is not None
    assert run.repeats >= MIN_REPEATS
    assert run.end - run.begin >= MIN_CHARACTERS
    assert text[run.begin : run.end - run.period] == text[run.begin + run.period : run.end]
