"""Labels cover exactly the assistant's text for any content, and decoding and encoding are inverse."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.tiny_templates import tiny_template
from twinkle.template import Template

FORGERIES = ['<|im_start|>assistant\n', '<|im_end|>', '<|im_end|>\n', '<think>', '</think>', '<tool_call>', '\n', ' ']
FORGERIES += ['\U000f5a00', '\U000f5a01', '\U000f5a02', '\U000f5a03', '\U0010fffd', '{% generation %}', '{{ 1 }}', '🙂']
TEXT = st.lists(st.sampled_from(FORGERIES) | st.text(st.characters(exclude_categories=['Cs'])), max_size=5).map(''.join)
NAMES = ('chatml', 'marked', 'thinking', 'tagged')


@pytest.fixture(scope='module')
def templates(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Template]:
    """One template for each kind of chat template that renders contents unchanged."""
    return {name: tiny_template(tmp_path_factory.mktemp(name), name) for name in NAMES}


def chat_of(texts: list[str]) -> list[dict[str, Any]]:
    """Return a chat whose turns have the given texts, starting with the user."""
    return [{'role': ('user', 'assistant')[index % 2], 'content': text} for index, text in enumerate(texts)]


def labelled_runs(feature: Any) -> list[list[int]]:
    """Return the runs of consecutive labelled tokens."""
    ids, labels = np.asarray(feature['input_ids']), np.asarray(feature['labels'])
    runs: list[list[int]] = [[]]
    for label, following in zip(labels[:-1], ids[1:], strict=True):
        if label == -100:
            runs.append([])
        else:
            assert label == following
            runs[-1].append(int(label))
    assert labels[-1] == -100
    return [run for run in runs if run]


@pytest.mark.parametrize('name', ['chatml', 'marked'])
@given(texts=st.lists(TEXT, min_size=2, max_size=6))
def test_labels_are_the_assistant_turns(templates: dict[str, Template], name: str, texts: list[str]) -> None:
    """Each assistant turn with its end token is one run of labels, even if texts contain turn tags or marks."""
    template = templates[name]
    feature = template.encode({'messages': chat_of(texts)})
    expected = [template.tokenizer.encode(f'{text}<|im_end|>') for text in texts[1::2]]
    assert labelled_runs(feature) == expected


@given(texts=st.lists(TEXT, min_size=2, max_size=6), reasoning=st.text(st.characters(exclude_categories=['Cs'])))
def test_user_texts_do_not_change_the_labels(templates: dict[str, Template], texts: list[str], reasoning: str) -> None:
    """User texts do not change the labels of templates that render thinking separately."""
    for name in ('thinking', 'tagged'):
        chat = [*chat_of(texts), *([] if len(texts) % 2 == 0 else chat_of(['', 'done'])[1:])]
        chat[-1]['reasoning_content'] = reasoning
        others = [{**turn, 'content': 'x'} if turn['role'] == 'user' else turn for turn in chat]
        actual, neutral = (labelled_runs(templates[name].encode({'messages': turns})) for turns in (chat, others))
        assert actual == neutral


@given(texts=st.lists(TEXT, min_size=1, max_size=5))
def test_encoding_decoded_text_gives_the_same_tokens(templates: dict[str, Template], texts: list[str]) -> None:
    """Decoding a chat or a turn and encoding the text again gives the same tokens."""
    for template in templates.values():
        feature = template.encode({'messages': chat_of(texts)})
        ids = [int(token) for token in feature['input_ids']]
        for run in [ids, *labelled_runs(feature)]:
            assert template.tokenizer.encode(template.decode(run)) == run


@given(texts=st.lists(TEXT, min_size=1, max_size=5), new=st.lists(st.integers(0, 258), max_size=9))
def test_appending_a_completion_changes_no_token(
    templates: dict[str, Template], texts: list[str], new: list[int]
) -> None:
    """A completion is appended without a change of any token, even where tokenizing the text would differ."""
    question = {'messages': chat_of(texts if len(texts) % 2 else texts[:-1])}
    for template in templates.values():
        prompt = template.encode(question, add_generation_prompt=True)
        joined = template.concat_input_feature(prompt, new)
        assert list(joined['input_ids']) == [*prompt['input_ids'], *new]
        assert [token for run in labelled_runs(joined) for token in run] == new
        assert joined['length'] == len(joined['labels']) == len(joined['completion_mask']) == len(joined['input_ids'])


@given(
    texts=st.lists(TEXT, min_size=2, max_size=6),
    limit=st.integers(1, 90),
    strategy=st.sampled_from(['left', 'right', 'split']),
)
def test_truncation_keeps_tokens_and_labels_aligned(
    templates: dict[str, Template], texts: list[str], limit: int, strategy: Any
) -> None:
    """Every piece is a range of at most `max_length` tokens, with the example's labels except the last label."""
    whole = templates['chatml'].encode({'messages': chat_of(texts)})
    truncating = Template(templates['chatml'].model_id, max_length=limit, truncation_strategy=strategy)
    pieces = truncating.batch_encode([{'messages': chat_of(texts)}])
    ids = list(whole['input_ids'])
    piece_ids = [list(piece['input_ids']) for piece in pieces]
    assert all(0 < len(piece) <= limit for piece in piece_ids)
    flat = [token for piece in piece_ids for token in piece]
    assert flat == {'left': ids[-limit:], 'right': ids[:limit], 'split': ids}[strategy]
    begin = len(ids) - len(flat) if strategy == 'left' else 0
    for piece in pieces:
        length = int(piece['length'])
        expected = np.append(np.asarray(whole['labels'])[begin : begin + length - 1], -100)
        np.testing.assert_array_equal(piece['labels'], expected)
        begin += length
