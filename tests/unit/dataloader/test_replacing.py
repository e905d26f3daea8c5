"""Rows that cannot be read are replaced and reported."""

import logging
import pickle
from collections.abc import Set
from itertools import chain
from typing import Any

import pytest

from twinkle.dataloader import BadSamples, DataLoader
from twinkle.dataset import DatasetMeta, IterableDataset, LazyDataset


def dataset_with_bad_rows(bad: Set[int], kind: type[Any] = LazyDataset, size: int = 10) -> Any:
    """Return a dataset of the rows 0, 1, ...; the rows in `bad` cannot be read."""

    def decode(value: int) -> int:
        if value in bad:
            raise ValueError(f'{value} is bad')
        return value

    dataset = kind(DatasetMeta(data=[{'x': i} for i in range(size)]))
    dataset.cast_column('x', decode)
    return dataset


def values(loader: DataLoader) -> list[list[int]]:
    """Return the values of one epoch, by batch."""
    return [[row['x'] for row in batch] for batch in loader]


def test_bad_rows_are_replaced_and_reported(caplog: pytest.LogCaptureFixture) -> None:
    """Batches keep their sizes, and each report names the row, the reason and the replacement row."""
    loader = DataLoader(dataset_with_bad_rows({2, 5}), batch_size=4)
    with caplog.at_level(logging.WARNING, logger='twinkle'):
        batches = values(loader)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    seen = list(chain.from_iterable(batches))
    assert [index for index, value in enumerate(seen) if value != index] == [2, 5]
    assert [(entry.position, entry.index) for entry in loader.replacements] == [(2, 2), (5, 5)]
    assert [seen[entry.position] for entry in loader.replacements] == [e.replacement for e in loader.replacements]
    assert all('is bad' in entry.reason for entry in loader.replacements)


def test_replacements_are_the_same_in_every_run() -> None:
    """Replacements depend only on the seed, the epoch and the position."""
    first, second = (DataLoader(dataset_with_bad_rows({2, 5, 7}), batch_size=3, shuffle=True) for _ in range(2))
    assert [values(first) for _ in range(2)] == [values(second) for _ in range(2)]
    assert first.replacements == second.replacements


def test_a_stream_continues_with_its_next_row() -> None:
    """A stream skips rows that cannot be read, and fills its batches with the next rows."""
    loader = DataLoader(dataset_with_bad_rows({0, 4, 9}, IterableDataset), batch_size=4)
    assert values(loader) == [[1, 2, 3, 5], [6, 7, 8]]
    assert [(entry.position, entry.index, entry.replacement) for entry in loader.replacements] == [
        (0, None, None), (4, None, None), (9, None, None),
    ]  # fmt: skip


@pytest.mark.parametrize('kind', [LazyDataset, IterableDataset])
def test_retries_are_bounded(kind: type[Any]) -> None:
    """Reading fails after the maximum number of retries, with the last reason."""
    for max_retries, count in ((20, 21), (0, 1)):
        loader = DataLoader(dataset_with_bad_rows(set(range(100)), kind, 100), batch_size=4, max_retries=max_retries)
        with pytest.raises(BadSamples, match='is bad') as caught:
            list(loader)
        assert caught.value.count == count
        assert isinstance(caught.value.__cause__, ValueError)
    with pytest.raises(ValueError, match='max_retries'):
        DataLoader([], batch_size=1, max_retries=-1)


def test_programming_errors_are_raised() -> None:
    """An exception that is not caused by invalid data is raised unchanged."""
    dataset = LazyDataset(DatasetMeta(data=[{'x': 1}]))
    dataset.cast_column('x', lambda value: value.absent)
    with pytest.raises(AttributeError):
        list(DataLoader(dataset, batch_size=1))


def test_the_error_can_be_pickled() -> None:
    """A pickled BadSamples keeps its attributes."""
    error = pickle.loads(pickle.dumps(BadSamples(3, 'place 1', 'why')))
    assert (error.count, error.place, error.reason) == (3, 'place 1', 'why')
