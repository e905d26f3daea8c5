"""The pipeline keeps every row or removes it with a reason, for any rows."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import Dataset, DatasetMeta
from twinkle.preprocessor import (
    AlpacaProcessor,
    DataFilter,
    Drop,
    HardFilter,
    InvalidArguments,
    MessageNormalizer,
    Preprocessor,
    QualityFilter,
    QualityPreprocessor,
    Row,
    RowPreprocessor,
    UnknownPreprocessor,
    build_filter,
    build_preprocessor,
    filter_names,
    refuse_paths,
)

Strategy = st.SearchStrategy[Any]
SCALARS: Strategy = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5)
)
ANY_VALUE: Strategy = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
ROLES: Strategy = st.sampled_from(['system', 'user', 'assistant', 'tool', 'human', 'gpt', '']) | SCALARS
CALL: Strategy = st.fixed_dictionaries({}, optional={'id': ANY_VALUE, 'function': ANY_VALUE})
CALLS: Strategy = st.lists(CALL, max_size=2) | ANY_VALUE
MESSAGES: Strategy = st.fixed_dictionaries(
    {'role': ROLES, 'content': ANY_VALUE}, optional={'tool_calls': CALLS, 'from': ROLES}
)
ROWS: Strategy = st.lists(
    st.fixed_dictionaries(
        {}, optional={'messages': st.lists(MESSAGES | ANY_VALUE, max_size=5) | ANY_VALUE, 'images': ANY_VALUE}
    ),
    max_size=8,
)
VALID_CHATS = [
    {'messages': [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': f'{text}?'}]}
    for text in ('one', 'two', 'three')
]


class ShortAnswers(QualityFilter):
    """A custom quality filter that keeps answers of at most ten characters."""

    def drop_of(self, row: Row) -> Drop | None:
        """Return a reason with the length of an answer that is too long."""
        length = len(row['messages'][-1]['content'])
        return Drop('long_answer', f'{length} characters') if length > 10 else None


class Uppercase(RowPreprocessor):
    """A custom preprocessor that writes texts in capital letters."""

    def convert(self, row: Row) -> Row:
        """Return the row with its texts in capital letters."""
        return {'messages': [{**message, 'content': message['content'].upper()} for message in row['messages']]}


class EverySecond(DataFilter):
    """A custom stateful filter that keeps every second row, starting with the first."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: Row) -> bool:
        """Return whether the row has an odd position in the iteration."""
        self.count += 1
        return self.count % 2 == 1

    def begin_pass(self) -> None:
        """Reset the counter."""
        self.count = 0


def _is_not_two(row: Row) -> bool:
    return row['messages'][0]['content'] != 'TWO'


def _has_a_question(row: Row) -> bool:
    return row['messages'][0]['content'] > ''


@settings(max_examples=25)
@given(ROWS)
def test_every_row_is_kept_or_removed_with_a_reason(rows: list[dict[str, Any]]) -> None:
    """No row raises an error, and each row is kept or removed with a reason, in order."""
    kept, dropped = QualityPreprocessor().split(rows)
    assert len(kept) + len(dropped) == len(rows)
    assert [row.row_index for row in dropped] == sorted(row.row_index for row in dropped)
    assert all(row.drop.reason and row.stage for row in dropped)


@settings(max_examples=25)
@given(ROWS)
def test_every_filter_accepts_any_row(rows: list[dict[str, Any]]) -> None:
    """No filter raises an error for any row, and a second iteration gives the same result."""
    for name in filter_names():
        quality = build_filter(name, {'column': 'messages'} if name == 'TextLengthFilter' else {})
        if isinstance(quality, QualityFilter):
            first = quality.split(rows)
            quality.begin_pass()
            assert repr(quality.split(rows)) == repr(first)


@settings(max_examples=25)
@given(ROWS, st.integers(1, 4))
def test_batches_do_not_change_the_result(rows: list[dict[str, Any]], size: int) -> None:
    """Rows in several batches give the same result as in a single batch."""
    whole, streamed = QualityPreprocessor(), QualityPreprocessor()
    parts = [streamed.split(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
    kept, dropped = whole.split(rows)
    assert repr(kept) == repr([row for part, _ in parts for row in part])
    assert repr(dropped) == repr([row for _, part in parts for row in part])
    assert streamed.end_pass() == whole.end_pass()


@settings(max_examples=25)
@given(ROWS)
def test_a_second_run_removes_nothing(rows: list[dict[str, Any]]) -> None:
    """A second run over the kept rows changes and removes nothing."""
    kept, _ = QualityPreprocessor().split(rows)
    second_kept, dropped = QualityPreprocessor().split(kept)
    assert repr(second_kept) == repr(kept)
    assert dropped == []


def test_stages_may_be_custom() -> None:
    """Names, classes, objects, options and functions can be mixed; each removed row names its stage."""
    pipeline: list[Any] = [
        'MessageNormalizer',
        {'name': 'HardFilter', 'init_args': {'max_messages': 2}},
        ShortAnswers,
        Uppercase(),
        _is_not_two,
    ]
    rows = [
        *VALID_CHATS,
        {'messages': [*VALID_CHATS[0]['messages'], *VALID_CHATS[1]['messages']]},
        {'messages': [{'role': 'user', 'content': 'q'}, {'role': 'assistant', 'content': 'a long answer'}]},
        {'text': 'no chat'},
    ]
    kept, dropped = QualityPreprocessor(pipeline).split(rows)
    assert [row['messages'][0]['content'] for row in kept] == ['ONE', 'THREE']
    assert [(row.row_index, row.stage, row.drop.reason) for row in dropped] == [
        (1, '_is_not_two', 'not_kept'),
        (3, 'HardFilter', 'too_many_messages'),
        (4, 'ShortAnswers', 'long_answer'),
        (5, 'MessageNormalizer', 'unreadable'),
    ]


def test_rows_for_which_a_stage_raises_are_removed() -> None:
    """A row for which a custom function raises is removed with the reason 'failed'."""
    quality = QualityPreprocessor([_has_a_question])
    _, dropped = quality.split([{}, {'messages': []}, {'messages': [7]}, {'messages': [{'content': None}]}])
    assert [row.drop.reason for row in dropped] == ['failed'] * 4


def test_datasets_accept_custom_filters_and_the_pipeline() -> None:
    """A filter object is reset for each dataset, and filters can be given by class or by name."""
    every_second = EverySecond()
    for _ in range(2):
        dataset = Dataset(DatasetMeta(data=[*VALID_CHATS, VALID_CHATS[0], {'messages': []}]))
        dataset.map('QualityPreprocessor', init_args={'pipeline': ['MessageSanityFilter', 'DedupFilter']})
        assert list(dataset) == VALID_CHATS
        dataset.filter(ShortAnswers)
        dataset.filter(every_second)
        assert list(dataset) == [VALID_CHATS[0], VALID_CHATS[2]]


def test_dropped_rows_are_logged(tmp_path: Path) -> None:
    """The log has one JSON object per removed row, even for values that are not JSON. A new iteration overwrites it."""
    path = tmp_path / 'dropped.jsonl'
    quality = QualityPreprocessor(['HardFilter'], str(path))
    assert not path.exists()
    self_reference: dict[str, Any] = {'messages': []}
    self_reference['self'] = self_reference
    quality.split([VALID_CHATS[0], {'messages': [], 'images': [b'abc', object()]}])
    malformed: dict[Any, Any] = {'messages': '\ud800', 1: 2}
    quality.split([self_reference, malformed])
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line['row_index'], line['stage'], line['reason']) for line in lines] == [
        (1, 'HardFilter', 'too_few_messages'),
        (2, 'HardFilter', 'too_few_messages'),
        (3, 'HardFilter', 'unreadable'),
    ]
    assert lines[0]['row']['images'] == ['<bytes of 3 bytes>', '<object>']
    assert lines[1]['row']['messages'] == []
    assert lines[2]['row']['1'] == 2
    quality.begin_pass()
    quality.split(VALID_CHATS)
    assert path.read_text() == ''


def test_a_pass_is_reported() -> None:
    """The report has one line per stage and reason, and is empty if no row was removed."""
    quality = QualityPreprocessor(['HardFilter', 'DedupFilter'])
    quality.split([*VALID_CHATS, *VALID_CHATS, {'messages': []}])
    assert len(quality.end_pass()) == 2
    quality.begin_pass()
    quality.split(VALID_CHATS)
    assert quality.end_pass() == []


def test_an_emptied_batch_keeps_its_columns() -> None:
    """A batch whose rows are all removed keeps the names of its columns."""
    quality = QualityPreprocessor(['HardFilter'])
    assert quality({'messages': [[]], 'id': [1]}) == {'messages': [], 'id': []}


@pytest.mark.parametrize(
    'pipeline',
    [
        [],
        'HardFilter',
        [{'init_args': {}}],
        [{'name': 'HardFilter', 'arguments': {}}],
        [{'name': HardFilter}],
        [{'name': 'HardFilter', 'init_args': {'max_messages': -1}}],
        [7],
        [AlpacaProcessor, QualityPreprocessor],
    ],
)
def test_invalid_pipelines_are_refused(pipeline: Any) -> None:
    """An invalid pipeline is refused before any row is read."""
    with pytest.raises(InvalidArguments):
        QualityPreprocessor(pipeline)


def test_pipelines_cannot_be_nested() -> None:
    """A pipeline as a stage is refused, because it could be given a log path."""
    with pytest.raises(UnknownPreprocessor):
        build_preprocessor('QualityPreprocessor', {'pipeline': [{'name': 'QualityPreprocessor'}]})


def test_invalid_log_paths_are_refused(tmp_path: Path) -> None:
    """A log path without an existing folder is refused, and `refuse_paths` refuses every path."""
    for path in (tmp_path, tmp_path / 'none' / 'dropped.jsonl'):
        with pytest.raises(InvalidArguments):
            QualityPreprocessor(dropped_log_path=str(path))
    with pytest.raises(InvalidArguments):
        refuse_paths({'dropped_log_path': 'x'})
    refuse_paths({'pipeline': []})


HUGE = 500_000
"""Approximate number of characters of a hostile text."""
HOSTILE = {
    'one character': 'a' * HUGE,
    'nearly one character': ('a' * 199 + 'b' + 'c' * 3) * (HUGE // 203),
    'fibonacci': '',
    'spaces': ' ' * HUGE,
    'lines': '\n' * HUGE,
    'braces': '\\boxed{' * (HUGE // 7),
    'apologies': 'sorry ' * (HUGE // 6),
    'think': '<think>' * (HUGE // 7),
    'digits': '1 ' * (HUGE // 2),
}
_word, _next = 'a', 'ab'
while len(_next) < HUGE:
    _word, _next = _next, _next + _word
HOSTILE['fibonacci'] = _next


@pytest.mark.timeout(60)
@pytest.mark.parametrize('name', HOSTILE)
def test_huge_texts_take_bounded_time(name: str) -> None:
    """Every filter finishes within the time limit for huge texts that are slow for naive algorithms."""
    row = {'messages': [{'role': 'user', 'content': HOSTILE[name]}, {'role': 'assistant', 'content': HOSTILE[name]}]}
    for filter_name in filter_names():
        quality = build_filter(filter_name, {'column': 'messages'} if filter_name == 'TextLengthFilter' else {})
        if isinstance(quality, QualityFilter):
            quality.judge(row)
    MessageNormalizer().convert(row)
    boxed = build_preprocessor('CompetitionMathGRPOProcessor')
    boxed(Preprocessor.map_row_to_col([{'problem': 'p', 'solution': f'{HOSTILE[name]} \\boxed{{1}}'}]))
