"""Tokens are labelled by the characters they begin at."""

from hypothesis import given
from hypothesis import strategies as st

from twinkle.template.labels import label_tokens

SPAN = st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(SPAN, max_size=6), st.lists(st.integers(0, 25), max_size=12))
def test_a_token_is_labelled_if_it_begins_in_any_span(spans: list[tuple[int, int]], places: list[int]) -> None:
    """Whatever the order of the spans, empty ones and those that overlap among them."""
    ids = list(range(len(places)))
    labels = label_tokens(ids, [(place, place + 1) for place in places], spans)
    inside = [any(begin <= place < end for begin, end in spans) for place in places]
    assert list(labels) == [token if is_in else -100 for token, is_in in zip(ids, inside, strict=True)]
