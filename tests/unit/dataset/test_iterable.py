"""A stream gives the rows a dataset in memory would, without holding them."""

import logging
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from twinkle.dataset import (
    BaseDataset,
    Dataset,
    DatasetError,
    DatasetMeta,
    InvalidExample,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    NotReady,
    RefusedRow,
    UnreadableFile,
    write_rows,
)
from twinkle.preprocessor import InvalidRow
from twinkle.preprocessor.quality import DedupFilter, QualityPreprocessor


def chat(text: str) -> dict[str, Any]:
    """One exchange."""
    return {'messages': [{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': text}]}


def numbers(count: int, **options: Any) -> DatasetMeta:
    """Rows that count from 0."""
    return DatasetMeta(data=[{'x': i} for i in range(count)], **options)


def worked_on(dataset: BaseDataset[Any], other: DatasetMeta, *, interleave: bool) -> list[dict[str, Any]]:
    """Use every verb that needs no template, and return the rows."""
    dataset.map(lambda columns: {'x': [value * 2 for value in columns['x'] for _ in range(2)]})
    dataset.add_dataset(other)
    dataset.mix_dataset(interleave=interleave)
    dataset.filter(lambda row: row['x'] % 3 != 0)
    dataset.cast_column('x', str)
    return list(dataset)


@settings(deadline=None)
@given(sizes=st.tuples(st.integers(0, 250), st.integers(0, 250)), interleave=st.booleans())
def test_stream_gives_the_rows_of_a_dataset(sizes: tuple[int, int], interleave: bool) -> None:  # noqa: FBT001
    """Map to more rows, mix, filter and cast give the same rows in the same order, in every pass."""
    first, second = (numbers(size) for size in sizes)
    stream = IterableDataset(first)
    expected = worked_on(Dataset(first), second, interleave=interleave)
    assert worked_on(stream, second, interleave=interleave) == expected
    assert list(stream) == expected


@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'csv'])
def test_files_are_streamed(tmp_path: Path, suffix: str) -> None:
    """Every format that is read whole is read piece by piece, too."""
    rows = [{'x': i, 'text': f'é, "{i}"'} for i in range(2500)]
    path = tmp_path / f'train.{suffix}'
    if suffix == 'json':
        path.write_text('[{"x": 0, "text": "a"}]')
        rows = [{'x': 0, 'text': 'a'}]
    else:
        write_rows(path, rows)
    assert list(IterableDataset(DatasetMeta(str(path)))) == rows


def test_only_what_is_needed_is_read() -> None:
    """A reader that stops early has caused little more than it read."""
    seen: list[int] = []

    def note(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        seen.extend(columns['x'])
        return columns

    dataset = IterableDataset(numbers(10_000))
    dataset.map(note)
    assert [row['x'] for row in islice(dataset, 3)] == [0, 1, 2]
    assert len(seen) <= 100


def test_slices_go_forwards_only() -> None:
    """Ascending indices are taken, those past the end left out; others are refused at once."""
    for data_slice in (range(1, 9, 3), slice(1, None, 3), [1, 4, 7, 30]):
        assert [row['x'] for row in IterableDataset(numbers(8, data_slice=data_slice))] == [1, 4, 7]
    for data_slice in (slice(-3, None), [4, 0], range(-1, 3)):
        with pytest.raises(DatasetError, match='data_slice'):
            IterableDataset(numbers(8, data_slice=data_slice))


def test_missing_files_are_found_at_once_and_broken_ones_when_read(tmp_path: Path) -> None:
    """What is not there is said by the constructor; what cannot be read ends the pass."""
    with pytest.raises(DatasetError):
        IterableDataset(DatasetMeta(str(tmp_path)))
    path = tmp_path / 'train.jsonl'
    path.write_text('{"x": 0}\n{')
    rows = iter(IterableDataset(DatasetMeta(str(path))).items())
    assert next(rows) == {'x': 0}
    with pytest.raises(UnreadableFile):
        next(rows)


def test_bad_rows_come_out_refused_and_the_others_follow() -> None:
    """`items` goes on behind a row that cannot be worked out; a plain loop raises what is wrong with it."""
    rows: list[dict[str, Any]] = [{'query': 'q', 'response': str(i)} for i in range(250)]
    del rows[130]['response']
    dataset = IterableDataset(DatasetMeta(data=rows))
    dataset.map('SelfCognitionProcessor', init_args={'model_name': 'a', 'model_author': 'b'})
    items = list(dataset.items())
    refused = {index: item.error for index, item in enumerate(items) if isinstance(item, RefusedRow)}
    assert len(items) == 250
    assert list(refused) == [130]
    assert isinstance(refused[130], InvalidRow)
    assert refused[130].row_index == 130
    with pytest.raises(InvalidRow):
        list(dataset)


def test_filters_that_remember_rows_begin_anew_in_each_pass(caplog: pytest.LogCaptureFixture) -> None:
    """Duplicates are left out in every pass alike, as a filter or in a pipeline, bad rows or not, and it is told."""
    rows = [{**chat(text), 'value': value} for text, value in [('a', '1'), ('b', '2'), ('a', 'x'), ('a', '3')]]
    for use in (
        lambda dataset: dataset.filter(DedupFilter()),
        lambda dataset: dataset.map(QualityPreprocessor([DedupFilter()])),
    ):
        stream, memory = IterableDataset(DatasetMeta(data=rows)), Dataset(DatasetMeta(data=rows))
        for dataset in (stream, memory):
            use(dataset)
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger='twinkle'):
            assert list(stream) == list(stream) == list(memory) == rows[:2]
        assert len([record for record in caplog.records if record.name.startswith('twinkle')]) == 2
    lazy = LazyDataset(DatasetMeta(data=rows))
    with pytest.raises(DatasetError):
        lazy.map(QualityPreprocessor([DedupFilter()]))
    lazy.filter(DedupFilter())
    assert list(lazy) == rows[:2]


def test_encode_and_check_equal_those_in_memory(tiny_llama_dir: Path) -> None:
    """Splitting, leaving out and encoding work on the way; every pass is the same."""
    rows = [chat('a'), chat('x' * 200), {'messages': [{'role': 'user', 'content': 'u'}]}]
    results: list[list[list[int]]] = []
    for kind in (Dataset, IterableDataset, IterableDataset):
        dataset = kind(DatasetMeta(data=rows))
        dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=100, truncation_strategy='split')
        dataset.check()
        dataset.encode()
        results.append([[int(token) for token in row['input_ids']] for row in dataset])
    assert len(results[0]) == 4
    assert results[0] == results[1] == results[2]


def packing(folder: Path, texts: list[str], **options: Any) -> IterablePackingDataset:
    """Encoded and packed chats."""
    dataset = IterablePackingDataset(DatasetMeta(data=[chat(text) for text in texts]), **options)
    dataset.set_template('Template', model_id=str(folder), max_length=100)
    dataset.encode()
    return dataset


def samples(packs: Iterator[dict[str, Any]]) -> list[tuple[int, ...]]:
    """The samples of packs, cut where positions begin anew."""
    found: list[tuple[int, ...]] = []
    for pack in packs:
        starts = np.flatnonzero(np.asarray(pack['position_ids']) == 0)[1:]
        found += [tuple(part) for part in np.split(np.asarray(pack['input_ids']), starts)]
    return found


def test_packs_of_a_stream_hold_every_sample(tiny_llama_dir: Path) -> None:
    """A pass over packs is a pass over the samples; a row that is too long is refused by itself."""
    dataset = packing(tiny_llama_dir, ['x' * (5 * i % 23) for i in range(40)], packing_interval=8)
    singles = [tuple(row['input_ids']) for row in dataset]
    dataset.pack_dataset()
    assert sorted(samples(iter(dataset))) == sorted(singles)
    assert sum(1 for _ in dataset) < len(singles)
    long = packing(tiny_llama_dir, ['a', 'x' * 200, 'b'])
    long.pack_dataset()
    kinds = [type(item) for item in long.items()]
    assert kinds.count(RefusedRow) == 1
    with pytest.raises(InvalidExample):
        list(long)


def test_cyclic_packs_go_on_with_the_first_row(tiny_llama_dir: Path) -> None:
    """Without end, every sample comes again; an empty dataset still ends; such a dataset is not saved whole."""
    dataset = packing(tiny_llama_dir, ['a', 'bb', 'ccc'], packing_interval=4, cyclic=True)
    dataset.pack_dataset()
    counts: dict[tuple[int, ...], int] = {}
    for sample in samples(islice(dataset, 20)):
        counts[sample] = counts.get(sample, 0) + 1
    assert len(counts) == 3
    assert min(counts.values()) > 5
    with pytest.raises(NotReady):
        dataset.save_as('packs.jsonl')
    empty = packing(tiny_llama_dir, [], cyclic=True)
    empty.pack_dataset()
    assert list(empty) == []


def test_packing_out_of_order_is_refused(tiny_llama_dir: Path) -> None:
    """Packing needs encoded training examples, once, and sensible numbers."""
    dataset = IterablePackingDataset(DatasetMeta(data=[chat('a')]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    with pytest.raises(NotReady):
        dataset.pack_dataset()
    dataset.encode(add_generation_prompt=True)
    with pytest.raises(NotReady):
        dataset.pack_dataset()
    packed = packing(tiny_llama_dir, ['a'])
    packed.pack_dataset()
    with pytest.raises(NotReady):
        packed.pack_dataset()
    for name in ('packing_interval', 'packing_num_proc'):
        with pytest.raises(ValueError, match=name):
            IterablePackingDataset(**{name: 0})
