"""Tokens are labelled according to their first character."""

from hypothesis import given
from hypothesis import strategies as st

from twinkle.template.labels import label_tokens

SPAN = st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(SPAN, max_size=6), st.lists(st.integers(0, 25), max_size=12))
def test_a_token_is_labelled_if_it_begins_in_any_span(spans: list[tuple[int, int]], starts: list[int]) -> None:
    """A token is labelled if any span contains its first character; spans may overlap, be empty or be unsorted."""
    ids = list(range(len(starts)))
    labels = label_tokens(ids, [(start, start + 1) for start in starts], spans)
    inside = [any(begin <= start < end for begin, end in spans) for start in starts]
    assert list(labels) == [token if is_in else -100 for token, is_in in zip(ids, inside, strict=True)]
