"""Tokens are labelled according to their first character."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.tiny_templates import tiny_template
from twinkle.template.labels import label_tokens

SPAN = st.tuples(st.integers(0, 20), st.integers(0, 6)).map(lambda pair: (pair[0], pair[0] + pair[1]))


@given(st.lists(SPAN, max_size=6), st.lists(st.integers(0, 25), max_size=12))
def test_a_token_is_labelled_if_it_starts_in_any_span(spans: list[tuple[int, int]], starts: list[int]) -> None:
    """A token is labelled if any span contains its first character; spans may overlap, be empty or be unsorted."""
    ids = list(range(len(starts)))
    labels = label_tokens(ids, [(start, start + 1) for start in starts], spans)
    inside = [any(begin <= start < end for begin, end in spans) for start in starts]
    assert list(labels) == [token if is_in else -100 for token, is_in in zip(ids, inside, strict=True)]


@pytest.mark.parametrize('name', ['chatml', 'marked'])
def test_a_message_with_the_weight_zero_has_no_labels(name: str, tmp_path: Path) -> None:
    """The weight selects the turns with labels, whether or not the chat template marks the assistant's text."""
    template = tiny_template(tmp_path, name)
    turns = [
        {'role': 'user', 'content': 'a'},
        {'role': 'assistant', 'content': 'first', 'weight': 0},
        {'role': 'user', 'content': 'b'},
        {'role': 'assistant', 'content': 'second'},
    ]
    feature = template.encode({'messages': turns})
    labels = np.asarray(feature.get('labels'))
    assert template.decode(labels[labels >= 0].tolist()) == 'second<|im_end|>'
    without = [{name: value for name, value in turn.items() if name != 'weight'} for turn in turns]
    assert np.array_equal(template.encode({'messages': without})['input_ids'], feature['input_ids'])
    assert feature.get('messages') == without
