"""Rows are saved immediately, or when training reads them."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle.dataset import (
    Dataset,
    DatasetMeta,
    IterableDataset,
    LazyDataset,
    NotReady,
    UnreadableFile,
    read_rows,
)

ROWS = [{'x': i, 'text': f't{i}'} for i in range(7)]


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet', 'csv'])
@pytest.mark.parametrize('kind', [Dataset, LazyDataset, IterableDataset])
def test_rows_are_saved_immediately(kind: type[Any], suffix: str, tmp_path: Path) -> None:
    """Every kind of dataset writes its computed rows."""
    dataset = kind(DatasetMeta(data=ROWS))
    dataset.map(lambda columns: {**columns, 'x': [value + 1 for value in columns['x']]})
    path = tmp_path / f'rows.{suffix}'
    dataset.save_as(path, batch_size=3)
    assert list(read_rows(path)) == [{**row, 'x': row['x'] + 1} for row in ROWS]


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet', 'csv'])
def test_training_records_each_row_once(suffix: str, tmp_path: Path) -> None:
    """The flushed file contains each row that was read, in the order of the first access."""
    path = tmp_path / f'rows.{suffix}'
    dataset = LazyDataset(DatasetMeta(data=ROWS))
    dataset.save_as(path, batch_size=2, mode='training')
    for index in (4, 1, -3, 4, 6):
        assert dataset[index] == ROWS[index]
    assert not path.exists()
    dataset.flush_save()
    assert dataset[0] == ROWS[0]
    assert list(read_rows(path)) == [ROWS[4], ROWS[1], ROWS[6]]
    assert [item.name for item in tmp_path.iterdir()] == [path.name]


def test_stream_is_recorded(tmp_path: Path) -> None:
    """A stream that is read again records only rows that are not recorded yet. Arrays are written as lists."""
    path = tmp_path / 'rows.jsonl'
    dataset = IterableDataset(DatasetMeta(data=[{'x': np.arange(i)} for i in range(3)]))
    dataset.save_as(path, mode='training')
    next(iter(dataset))
    list(dataset)
    dataset.flush_save()
    assert list(read_rows(path)) == [{'x': []}, {'x': [0]}, {'x': [0, 1]}]


def test_a_failed_run_keeps_its_recorded_rows(tmp_path: Path) -> None:
    """Complete batches are on disk before the flush, and a new recording does not overwrite them."""
    path = tmp_path / 'rows.jsonl'
    for _ in range(2):
        dataset = Dataset(DatasetMeta(data=ROWS))
        dataset.save_as(path, batch_size=2, mode='training')
        assert list(dataset) == ROWS
    leftovers = list(tmp_path.glob('.*.part'))
    assert [len(read_rows(leftover, 'jsonl')) for leftover in leftovers] == [6, 6]


def test_misuse_is_refused(tmp_path: Path) -> None:
    """Changes while recording, a flush without recording, and invalid options are refused."""
    dataset = Dataset(DatasetMeta(data=ROWS))
    with pytest.raises(NotReady):
        dataset.flush_save()
    with pytest.raises(ValueError, match='mode'):
        dataset.save_as(tmp_path / 'a.jsonl', mode='later')
    with pytest.raises(ValueError, match='batch_size'):
        dataset.save_as(tmp_path / 'a.jsonl', batch_size=0)
    with pytest.raises(UnreadableFile):
        dataset.save_as(tmp_path / 'a.txt', mode='training')
    dataset.save_as(tmp_path / 'a.jsonl', mode='training')
    for step in (
        lambda: dataset.filter(lambda _row: True),
        dataset.mix_dataset,
        lambda: dataset.save_as(tmp_path / 'b.jsonl'),
    ):
        with pytest.raises(NotReady, match='flush_save'):
            step()


@pytest.mark.parametrize(('name', 'value'), [('WORLD_SIZE', '2'), ('RANK', '1')])
def test_several_ranks_cannot_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, value: str) -> None:
    """Recording is refused if `WORLD_SIZE` is above 1 or `RANK` is not 0, and no file is created."""
    monkeypatch.setenv(name, value)
    dataset = Dataset(DatasetMeta(data=ROWS))
    with pytest.raises(NotReady):
        dataset.save_as(tmp_path / 'a.jsonl', mode='training')
    assert list(tmp_path.iterdir()) == []
    monkeypatch.setenv(name, '1' if name == 'WORLD_SIZE' else '0')
    dataset.save_as(tmp_path / 'a.jsonl', mode='training')


def test_recordings_of_one_path_use_different_part_files(tmp_path: Path) -> None:
    """Two recordings of the same path use separate `.part` files."""
    recorded = [Dataset(DatasetMeta(data=ROWS[:count])) for count in (2, 3)]
    for dataset in recorded:
        dataset.save_as(tmp_path / 'a.jsonl', batch_size=1, mode='training')
    for dataset in recorded:
        list(dataset)
    assert [len(read_rows(part, 'jsonl')) for part in sorted(tmp_path.glob('.*.part'))] == [2, 3]
