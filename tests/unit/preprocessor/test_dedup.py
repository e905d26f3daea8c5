"""Exact and near duplicates are found, and rows that differ in relevant values are kept."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.preprocessor import DedupFilter, build_filter
from twinkle.preprocessor.quality.minhash import signature, similarity

STORY = ' '.join(f'The {i}th traveller told of a town beyond the hills that never slept.' for i in 'abcdefghijklm')


def rows(*questions: str, answer: str = 'ok', **more: Any) -> list[dict[str, Any]]:
    """Return one chat per question."""
    turns = [[{'role': 'user', 'content': q}, {'role': 'assistant', 'content': answer}] for q in questions]
    return [{'messages': messages, **more} for messages in turns]


def reasons(dedup: DedupFilter, given_rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the index and reason of each removed row."""
    return [(dropped.row_index, dropped.drop.reason) for dropped in dedup.split(given_rows)[1]]


def test_exact_duplicates_may_differ_in_whitespace() -> None:
    """Rows that differ only in whitespace are duplicates; case and words are significant."""
    found = reasons(DedupFilter(threshold=1), rows('a  b', 'a b', 'A b', 'a\nb'))
    assert found == [(1, 'duplicate'), (3, 'duplicate')]


def test_near_duplicates_share_most_of_their_text() -> None:
    """A changed word in a long text gives a near duplicate, which is kept if only exact duplicates are removed."""
    given_rows = rows(STORY, STORY.replace('never', 'hardly', 1), 'Something else.')
    assert reasons(DedupFilter(), given_rows) == [(1, 'near_duplicate')]
    assert reasons(DedupFilter(threshold=1), given_rows) == []


def test_different_numbers_prevent_near_duplicates() -> None:
    """Texts with different numbers are not near duplicates, even if their words are equal."""
    assert reasons(DedupFilter(), rows(f'{STORY} What is 3 + 4?', f'{STORY} What is 3 + 5?')) == []


def test_non_text_values_must_be_equal() -> None:
    """Rows with different images, tools or system messages are not duplicates."""
    different = [
        *rows(STORY, images=[b'one']),
        *rows(STORY, images=[b'two']),
        *rows(STORY, tools=[{'name': 'a'}]),
        *rows([{'type': 'text', 'text': STORY}, {'type': 'image', 'image': b'one'}]),  # pyright: ignore[reportArgumentType]
        *rows([{'type': 'text', 'text': STORY}, {'type': 'image', 'image': b'two'}]),  # pyright: ignore[reportArgumentType]
        {'messages': [{'role': 'system', 'content': 'Be brief.'}, *rows(STORY)[0]['messages']]},
        {'messages': [{'role': 'system', 'content': 'Be kind.'}, *rows(STORY)[0]['messages']]},
    ]
    assert reasons(DedupFilter(), different) == []
    assert [index for index, _ in reasons(DedupFilter(), [*different, *different])] == list(range(7, 14))


def test_incomparable_objects_are_never_duplicates() -> None:
    """Rows with objects whose content cannot be read are kept."""
    assert reasons(DedupFilter(), rows('a', images=[object()]) * 2) == []


def test_other_columns_may_be_compared() -> None:
    """Rows without messages can be compared by other columns; rows that have none of the columns are unreadable."""
    dedup = build_filter('DedupFilter', {'columns': ['query'], 'threshold': 1})
    assert isinstance(dedup, DedupFilter)
    given_rows = [{'query': 'a', 'id': 1}, {'query': 'a', 'id': 2}, {'id': 3}, {'id': 4}]
    assert reasons(dedup, given_rows) == [(1, 'duplicate'), (2, 'unreadable'), (3, 'unreadable')]


def test_memory_is_bounded() -> None:
    """The filter compares a row only with the newest rows, so distant duplicates are kept."""
    dedup = DedupFilter(memory=2, near_memory=2)
    assert reasons(dedup, rows('one', 'two', 'three', 'two', 'one')) == [(3, 'duplicate')]


def test_a_new_pass_ignores_earlier_rows() -> None:
    """`build_filter` resets a filter object, so that several datasets can use it one after the other."""
    dedup = DedupFilter()
    assert len(dedup.split(rows('a', 'b'))[0]) == 2
    assert len(dedup.split(rows('a'))[0]) == 0
    assert build_filter(dedup) is dedup
    assert len(dedup.split(rows('a', 'b'))[0]) == 2


@settings(max_examples=50)
@given(st.lists(st.text(max_size=40), max_size=12))
def test_every_text_is_kept_once(texts: list[str]) -> None:
    """Every distinct text is kept exactly once."""
    dedup = DedupFilter(threshold=1)
    kept, dropped = dedup.split(rows(*texts))
    kept_texts = [' '.join(row['messages'][0]['content'].split()) for row in kept]
    assert len(set(kept_texts)) == len(kept_texts)
    assert {' '.join(drop.row['messages'][0]['content'].split()) for drop in dropped} <= set(kept_texts)
    assert set(kept_texts) == {' '.join(text.split()) for text in texts}


@settings(max_examples=50)
@given(st.text(max_size=300), st.text(max_size=300))
def test_similarity_estimates_the_jaccard_similarity(one: str, other: str) -> None:
    """The estimate is symmetric, is 1 for equal texts, and is close to the Jaccard similarity."""
    first, second = signature(one), signature(other)
    assert similarity(first, signature(one)) == 1.0
    assert similarity(first, second) == similarity(second, first)
    assert abs(similarity(first, second) - _jaccard(one, other)) < 0.25


def test_signatures_are_deterministic() -> None:
    """The signature of a text equals the recorded values."""
    assert signature('The quick brown fox')[:3].tolist() == RECORDED


def _jaccard(one: str, other: str) -> float:
    shingles = [_shingles(' '.join(text.casefold().split()).ljust(8, '\0')) for text in (one, other)]
    return len(shingles[0] & shingles[1]) / len(shingles[0] | shingles[1])


def _shingles(text: str) -> set[str]:
    return {text[i : i + 8] for i in range(len(text) - 7)}


RECORDED = [260362015, 35869622, 24049261]
