"""A stream gives the same rows as a dataset in memory."""

import logging
from collections.abc import Callable, Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
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
    """Return a row with one user message and one assistant message."""
    return {'messages': [{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': text}]}


def numbers(count: int, **options: Any) -> DatasetMeta:
    """Return `count` rows with the values 0, 1, ... in the column `x`."""
    return DatasetMeta(data=[{'x': i} for i in range(count)], **options)


def transformed_rows(dataset: BaseDataset[Any], other: DatasetMeta, *, interleave: bool) -> list[dict[str, Any]]:
    """Apply every method that needs no template, and return the rows."""
    dataset.map(lambda columns: {'x': [value * 2 for value in columns['x'] for _ in range(2)]})
    dataset.add_dataset(other)
    dataset.mix_dataset(interleave=interleave)
    dataset.filter(lambda row: row['x'] % 3 != 0)
    dataset.cast_column('x', str)
    return list(dataset)


@given(sizes=st.tuples(st.integers(0, 250), st.integers(0, 250)), interleave=st.booleans())
def test_stream_equals_dataset(sizes: tuple[int, int], interleave: bool) -> None:  # noqa: FBT001
    """`map`, `mix_dataset`, `filter` and `cast_column` give the same rows in the same order, in every iteration."""
    first, second = (numbers(size) for size in sizes)
    stream = IterableDataset(first)
    expected = transformed_rows(Dataset(first), second, interleave=interleave)
    assert transformed_rows(stream, second, interleave=interleave) == expected
    assert list(stream) == expected


@pytest.mark.parametrize('suffix', ['jsonl', 'json', 'parquet', 'csv'])
def test_files_are_streamed(tmp_path: Path, suffix: str) -> None:
    """Files of every format can be read as a stream."""
    rows = [{'x': i, 'text': f'é, "{i}"'} for i in range(2500)]
    path = tmp_path / f'train.{suffix}'
    if suffix == 'json':
        path.write_text('[{"x": 0, "text": "a"}]')
        rows = [{'x': 0, 'text': 'a'}]
    else:
        write_rows(path, rows)
    assert list(IterableDataset(DatasetMeta(str(path)))) == rows


def test_read_ahead_is_limited() -> None:
    """If a reader stops early, at most one batch of rows has been processed."""
    seen: list[int] = []

    def observe(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        seen.extend(columns['x'])
        return columns

    dataset = IterableDataset(numbers(10_000))
    dataset.map(observe)
    assert [row['x'] for row in islice(dataset, 3)] == [0, 1, 2]
    assert len(seen) <= 100


def test_slices_must_be_ascending() -> None:
    """Ascending indices are accepted, indices past the end are skipped, and other indices are refused."""
    for data_slice in (range(1, 9, 3), slice(1, None, 3), [1, 4, 7, 30]):
        assert [row['x'] for row in IterableDataset(numbers(8, data_slice=data_slice))] == [1, 4, 7]
    for data_slice in (slice(-3, None), [4, 0], range(-1, 3)):
        with pytest.raises(DatasetError, match='data_slice'):
            IterableDataset(numbers(8, data_slice=data_slice))


def test_missing_files_are_refused_early_and_broken_files_on_read(tmp_path: Path) -> None:
    """The constructor refuses missing files, and a broken file is refused before or while it is read."""
    with pytest.raises(DatasetError):
        IterableDataset(DatasetMeta(str(tmp_path)))
    path = tmp_path / 'train.jsonl'
    path.write_text('{"x": 0}\n{')
    with pytest.raises(UnreadableFile, match=r'train\.jsonl'):
        list(IterableDataset(DatasetMeta(str(path))).items())


def test_invalid_rows_do_not_end_a_pass_over_items() -> None:
    """`items` continues after an invalid row; a plain loop raises the row's error."""
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


@pytest.mark.parametrize('interleave', [True, False])
def test_refused_rows_name_their_part_and_step(interleave: bool) -> None:  # noqa: FBT001 (parametrized)
    """A refused row has the index of its part and the number of steps after the one that refused it."""
    metas = [DatasetMeta(data=[{'x': value} for value in values]) for values in ([1, 2], [3, 4])]
    dataset = IterableDataset()
    for meta in metas:
        dataset.add_dataset(meta)
    dataset.map(_refuse(2), metas[0])
    dataset.map(_refuse(3), metas[1])
    dataset.filter(lambda row: bool(row['x']), metas[1])
    dataset.mix_dataset(interleave=interleave)
    dataset.map(_refuse(4))
    dataset.map(_refuse(0))
    refused = {
        str(item.error): (item.part, item.later_steps) for item in dataset.items() if isinstance(item, RefusedRow)
    }
    assert refused == {'2': (0, 2), '3': (1, 3), '4': (0, 1)}


def _refuse(value: int) -> Callable[[Any], Any]:
    """Return a preprocessor that refuses a value."""

    def refuse(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if value in columns['x']:
            raise ValueError(str(value))
        return columns

    return refuse


def test_stateful_filters_are_reset_in_each_pass(caplog: pytest.LogCaptureFixture) -> None:
    """A filter and a pipeline remove and log duplicates in every iteration; a lazy dataset accepts only the filter."""
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


def test_encode_and_check_equal_a_dataset(tiny_llama_dir: Path) -> None:
    """Encoding, splitting and checking a stream give the same rows as a dataset in memory."""
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


def packed_chats(folder: Path, texts: list[str], **options: Any) -> IterablePackingDataset:
    """Return an encoded dataset that can be packed."""
    dataset = IterablePackingDataset(DatasetMeta(data=[chat(text) for text in texts]), **options)
    dataset.set_template('Template', model_id=str(folder), max_length=100)
    dataset.encode()
    return dataset


def samples(packs: Iterator[dict[str, Any]]) -> list[tuple[int, ...]]:
    """Return the samples of packs; a sample begins where the positions restart."""
    found: list[tuple[int, ...]] = []
    for pack in packs:
        starts = np.flatnonzero(np.asarray(pack['position_ids']) == 0)[1:]
        found += [tuple(part) for part in np.split(np.asarray(pack['input_ids']), starts)]
    return found


def test_packs_of_a_stream_contain_every_sample(tiny_llama_dir: Path) -> None:
    """Every sample is in one pack; a row that is too long is refused and does not affect other rows."""
    dataset = packed_chats(tiny_llama_dir, ['x' * (5 * i % 23) for i in range(40)], packing_interval=8)
    singles = [tuple(row['input_ids']) for row in dataset]
    dataset.pack_dataset()
    assert sorted(samples(iter(dataset))) == sorted(singles)
    assert sum(1 for _ in dataset) < len(singles)
    long = packed_chats(tiny_llama_dir, ['a', 'x' * 200, 'b'])
    long.pack_dataset()
    kinds = [type(item) for item in long.items()]
    assert kinds.count(RefusedRow) == 1
    with pytest.raises(InvalidExample):
        list(long)


def test_cyclic_packs_repeat_the_rows(tiny_llama_dir: Path) -> None:
    """Samples are repeated endlessly, an empty dataset has no packs, and an endless dataset cannot be saved."""
    dataset = packed_chats(tiny_llama_dir, ['a', 'bb', 'ccc'], packing_interval=4, cyclic=True)
    dataset.pack_dataset()
    counts: dict[tuple[int, ...], int] = {}
    for sample in samples(islice(dataset, 20)):
        counts[sample] = counts.get(sample, 0) + 1
    assert len(counts) == 3
    assert min(counts.values()) > 5
    with pytest.raises(NotReady):
        dataset.save_as('packs.jsonl')
    empty = packed_chats(tiny_llama_dir, [], cyclic=True)
    empty.pack_dataset()
    assert list(empty) == []


def test_packing_at_the_wrong_time_is_refused(tiny_llama_dir: Path) -> None:
    """Packing is accepted once, and only for encoded training examples; arguments out of range are refused."""
    dataset = IterablePackingDataset(DatasetMeta(data=[chat('a')]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    with pytest.raises(NotReady):
        dataset.pack_dataset()
    dataset.encode(add_generation_prompt=True)
    with pytest.raises(NotReady):
        dataset.pack_dataset()
    packed = packed_chats(tiny_llama_dir, ['a'])
    packed.pack_dataset()
    with pytest.raises(NotReady):
        packed.pack_dataset()
    for name in ('packing_interval', 'packing_num_proc'):
        with pytest.raises(ValueError, match=name):
            IterablePackingDataset(**{name: 0})
