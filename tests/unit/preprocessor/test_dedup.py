"""Duplicates are found, exactly and nearly, and rows that differ in what matters are not taken for each other."""

from typing import Any

from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.preprocessor import DedupFilter, build_filter
from twinkle.preprocessor.quality.minhash import signature, similarity

STORY = ' '.join(f'The {i}th traveller told of a town beyond the hills where nobody slept.' for i in 'abcdefghijklm')


def rows(*questions: str, answer: str = 'ok', **more: Any) -> list[dict[str, Any]]:
    """Return chats that ask."""
    turns = [[{'role': 'user', 'content': q}, {'role': 'assistant', 'content': answer}] for q in questions]
    return [{'messages': messages, **more} for messages in turns]


def reasons(dedup: DedupFilter, given_rows: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return index and reason of the rows left out."""
    return [(dropped.row_index, dropped.drop.reason) for dropped in dedup.split(given_rows)[1]]


def test_exact_duplicates_differ_in_blanks_at_most() -> None:
    """The first stays; case and words count."""
    found = reasons(DedupFilter(threshold=1), rows('a  b', 'a b', 'A b', 'a\nb'))
    assert found == [(1, 'duplicate'), (3, 'duplicate')]


def test_near_duplicates_share_most_of_their_text() -> None:
    """A word changed in a long text makes a near duplicate, unless only exact ones are asked for."""
    given_rows = rows(STORY, STORY.replace('nobody', 'no one', 1), 'Something else.')
    assert reasons(DedupFilter(), given_rows) == [(1, 'near_duplicate')]
    assert reasons(DedupFilter(threshold=1), given_rows) == []


def test_other_numbers_make_another_text() -> None:
    """A task with other numbers is another task, however alike the words."""
    assert reasons(DedupFilter(), rows(f'{STORY} What is 3 + 4?', f'{STORY} What is 3 + 5?')) == []


def test_what_is_no_text_has_to_be_equal_too() -> None:
    """Images, whether in a column or in a message, tools and the system message tell rows apart."""
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


def test_objects_that_cannot_be_read_are_never_duplicates() -> None:
    """Better one row too many than one lost."""
    assert reasons(DedupFilter(), rows('a', images=[object()]) * 2) == []


def test_other_columns_may_be_compared() -> None:
    """Raw rows have no messages yet; a row with none of the columns is no duplicate but unreadable."""
    dedup = build_filter('DedupFilter', {'columns': ['query'], 'threshold': 1})
    assert isinstance(dedup, DedupFilter)
    given_rows = [{'query': 'a', 'id': 1}, {'query': 'a', 'id': 2}, {'id': 3}, {'id': 4}]
    assert reasons(dedup, given_rows) == [(1, 'duplicate'), (2, 'unreadable'), (3, 'unreadable')]


def test_memory_is_bounded() -> None:
    """The oldest rows are forgotten first, so that duplicates far apart stay."""
    dedup = DedupFilter(memory=2, near_memory=2)
    assert reasons(dedup, rows('one', 'two', 'three', 'two', 'one')) == [(3, 'duplicate')]


def test_a_pass_remembers_nothing_of_the_one_before() -> None:
    """The same filter object can be given to one dataset after the other."""
    dedup = DedupFilter()
    assert len(dedup.split(rows('a', 'b'))[0]) == 2
    assert len(dedup.split(rows('a'))[0]) == 0
    assert build_filter(dedup) is dedup
    assert len(dedup.split(rows('a', 'b'))[0]) == 2


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=40), max_size=12))
def test_every_text_stays_once(texts: list[str]) -> None:
    """What stays has no two texts alike, and what does not stay has its like among what stays."""
    dedup = DedupFilter(threshold=1)
    kept, dropped = dedup.split(rows(*texts))
    said = [' '.join(row['messages'][0]['content'].split()) for row in kept]
    assert len(set(said)) == len(said)
    assert {' '.join(drop.row['messages'][0]['content'].split()) for drop in dropped} <= set(said)
    assert set(said) == {' '.join(text.split()) for text in texts}


@settings(max_examples=50, deadline=None)
@given(st.text(max_size=300), st.text(max_size=300))
def test_resemblance_is_what_shared_pieces_make_it(one: str, other: str) -> None:
    """The estimate is 1 for equal texts, the same both ways, and near the true share of common pieces."""
    first, second = signature(one), signature(other)
    assert similarity(first, signature(one)) == 1.0
    assert similarity(first, second) == similarity(second, first)
    assert abs(similarity(first, second) - _jaccard(one, other)) < 0.25


def test_sketches_are_the_same_everywhere() -> None:
    """A sketch depends on the text alone; these numbers were computed once."""
    assert signature('The quick brown fox')[:3].tolist() == PINNED


def _jaccard(one: str, other: str) -> float:
    pieces = [_pieces(' '.join(text.casefold().split()).ljust(8, '\0')) for text in (one, other)]
    return len(pieces[0] & pieces[1]) / len(pieces[0] | pieces[1])


def _pieces(text: str) -> set[str]:
    return {text[i : i + 8] for i in range(len(text) - 7)}


PINNED = [260362015, 35869622, 24049261]
