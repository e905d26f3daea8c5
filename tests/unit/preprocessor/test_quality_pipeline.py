"""The pipeline accounts for every row, whatever the rows are."""

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
    refuse_places,
)

Strategy = st.SearchStrategy[Any]
SCALARS: Strategy = (
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20) | st.binary(max_size=5)
)
JUNK: Strategy = st.recursive(
    SCALARS, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner)
)
ROLES: Strategy = st.sampled_from(['system', 'user', 'assistant', 'tool', 'human', 'gpt', '']) | SCALARS
CALL: Strategy = st.fixed_dictionaries({}, optional={'id': JUNK, 'function': JUNK})
CALLS: Strategy = st.lists(CALL, max_size=2) | JUNK
MESSAGES: Strategy = st.fixed_dictionaries(
    {'role': ROLES, 'content': JUNK}, optional={'tool_calls': CALLS, 'from': ROLES}
)
ROWS: Strategy = st.lists(
    st.fixed_dictionaries({}, optional={'messages': st.lists(MESSAGES | JUNK, max_size=5) | JUNK, 'images': JUNK}),
    max_size=8,
)
SANE = [
    {'messages': [{'role': 'user', 'content': text}, {'role': 'assistant', 'content': f'{text}?'}]}
    for text in ('one', 'two', 'three')
]


class ShortAnswers(QualityFilter):
    """A filter of one's own: answers have at most ten characters."""

    def drop_of(self, row: Row) -> Drop | None:
        """Return how long the answer is where it is too long."""
        length = len(row['messages'][-1]['content'])
        return Drop('long_answer', f'{length} characters') if length > 10 else None


class Shouting(RowPreprocessor):
    """A rewriter of one's own."""

    def convert(self, row: Row) -> Row:
        """Return the row in capitals."""
        return {'messages': [{**message, 'content': message['content'].upper()} for message in row['messages']]}


class Every(DataFilter):
    """A filter of one's own that remembers: every second row stays."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, row: Row) -> bool:
        """Return whether it is the first, third and so on."""
        self.count += 1
        return self.count % 2 == 1

    def begin_pass(self) -> None:
        """Count from the beginning."""
        self.count = 0


def _is_not_two(row: Row) -> bool:
    return row['messages'][0]['content'] != 'TWO'


def _has_a_question(row: Row) -> bool:
    return row['messages'][0]['content'] > ''


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_no_row_is_lost(rows: list[dict[str, Any]]) -> None:
    """Whatever the rows are, nothing raises, and each is either kept or dropped with a reason, in order."""
    kept, dropped = QualityPreprocessor().split(rows)
    assert len(kept) + len(dropped) == len(rows)
    assert [row.row_index for row in dropped] == sorted(row.row_index for row in dropped)
    assert all(row.drop.reason and row.stage for row in dropped)


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_every_filter_takes_every_row(rows: list[dict[str, Any]]) -> None:
    """Each filter alone judges what is no chat without raising, and the same way again in a new pass."""
    for name in filter_names():
        quality = build_filter(name, {'column': 'messages'} if name == 'TextLengthFilter' else {})
        if isinstance(quality, QualityFilter):
            first = quality.split(rows)
            quality.begin_pass()
            assert repr(quality.split(rows)) == repr(first)


@settings(max_examples=25, deadline=None)
@given(ROWS, st.integers(1, 4))
def test_batches_make_no_difference(rows: list[dict[str, Any]], size: int) -> None:
    """Rows that stream in batches are judged as if they came at once."""
    whole, streamed = QualityPreprocessor(), QualityPreprocessor()
    parts = [streamed.split(rows[begin : begin + size]) for begin in range(0, len(rows), size)]
    kept, dropped = whole.split(rows)
    assert repr(kept) == repr([row for part, _ in parts for row in part])
    assert repr(dropped) == repr([row for _, part in parts for row in part])
    assert streamed.end_pass() == whole.end_pass()


@settings(max_examples=25, deadline=None)
@given(ROWS)
def test_what_was_kept_is_kept_again(rows: list[dict[str, Any]]) -> None:
    """Normal rows are normal, and a clean dataset stays as it is."""
    kept, _ = QualityPreprocessor().split(rows)
    again, dropped = QualityPreprocessor().split(kept)
    assert repr(again) == repr(kept)
    assert dropped == []


def test_stages_may_be_one_s_own() -> None:
    """Names, classes, objects, options and plain functions mix; each names itself in what it leaves out."""
    pipeline: list[Any] = [
        'MessageNormalizer',
        {'name': 'HardFilter', 'init_args': {'max_messages': 2}},
        ShortAnswers,
        Shouting(),
        _is_not_two,
    ]
    rows = [
        *SANE,
        {'messages': [*SANE[0]['messages'], *SANE[1]['messages']]},
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


def test_stages_that_stumble_leave_the_row_out() -> None:
    """What a function of one's own does not expect is accounted for like everything else."""
    quality = QualityPreprocessor([_has_a_question])
    _, dropped = quality.split([{}, {'messages': []}, {'messages': [7]}, {'messages': [{'content': None}]}])
    assert [row.drop.reason for row in dropped] == ['failed'] * 4


def test_datasets_take_one_s_own_filters_and_the_pipeline() -> None:
    """By object, class or name; an object begins anew with each dataset."""
    every = Every()
    for _ in range(2):
        dataset = Dataset(DatasetMeta(data=[*SANE, SANE[0], {'messages': []}]))
        dataset.map('QualityPreprocessor', init_args={'pipeline': ['MessageSanityFilter', 'DedupFilter']})
        assert list(dataset) == SANE
        dataset.filter(ShortAnswers)
        dataset.filter(every)
        assert list(dataset) == [SANE[0], SANE[2]]


def test_dropped_rows_are_logged(tmp_path: Path) -> None:
    """One JSON object a row, batch behind batch; what has no JSON form is described; a new pass begins anew."""
    path = tmp_path / 'dropped.jsonl'
    quality = QualityPreprocessor(['HardFilter'], str(path))
    assert not path.exists()
    circle: dict[str, Any] = {'messages': []}
    circle['self'] = circle
    quality.split([SANE[0], {'messages': [], 'images': [b'abc', object()]}])
    odd: dict[Any, Any] = {'messages': '\ud800', 1: 2}
    quality.split([circle, odd])
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
    quality.split(SANE)
    assert path.read_text() == ''


def test_a_pass_is_summed_up() -> None:
    """One line a stage and reason; nothing where nothing was left out."""
    quality = QualityPreprocessor(['HardFilter', 'DedupFilter'])
    quality.split([*SANE, *SANE, {'messages': []}])
    assert len(quality.end_pass()) == 2
    quality.begin_pass()
    quality.split(SANE)
    assert quality.end_pass() == []


def test_a_batch_of_which_nothing_stays_keeps_its_columns() -> None:
    """Later batches have the same columns."""
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
def test_pipelines_that_make_no_sense_are_refused(pipeline: Any) -> None:
    """Before any row is read."""
    with pytest.raises(InvalidArguments):
        QualityPreprocessor(pipeline)


def test_pipelines_hold_no_pipelines() -> None:
    """By name neither, so that no stage brings arguments of its own that name files."""
    with pytest.raises(UnknownPreprocessor):
        build_preprocessor('QualityPreprocessor', {'pipeline': [{'name': 'QualityPreprocessor'}]})


def test_a_log_needs_its_folder(tmp_path: Path) -> None:
    """A place that cannot be written to is refused at once, and a service refuses every place."""
    for path in (tmp_path, tmp_path / 'none' / 'dropped.jsonl'):
        with pytest.raises(InvalidArguments):
            QualityPreprocessor(dropped_log_path=str(path))
    with pytest.raises(InvalidArguments):
        refuse_places({'dropped_log_path': 'x'})
    refuse_places({'pipeline': []})


HUGE = 500_000
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
    """Texts made to be slow take each filter time linear in their length."""
    row = {'messages': [{'role': 'user', 'content': HOSTILE[name]}, {'role': 'assistant', 'content': HOSTILE[name]}]}
    for filter_name in filter_names():
        quality = build_filter(filter_name, {'column': 'messages'} if filter_name == 'TextLengthFilter' else {})
        if isinstance(quality, QualityFilter):
            quality.judge(row)
    MessageNormalizer().convert(row)
    boxed = build_preprocessor('CompetitionMathGRPOProcessor')
    boxed(Preprocessor.map_row_to_col([{'problem': 'p', 'solution': f'{HOSTILE[name]} \\boxed{{1}}'}]))
