"""The rows of a lazy dataset are computed on access and equal those of a dataset in memory."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle.dataset import Dataset, DatasetError, DatasetMeta, InvalidExample, LazyDataset, RefusedRow
from twinkle.preprocessor import InvalidRow, SelfCognitionProcessor

ROWS = [{'query': f'q{i}', 'response': f'{{{{NAME}}}} {i}'} for i in range(5)]


def chat(text: str) -> dict[str, Any]:
    """Return a row with one user message and one assistant message."""
    return {'messages': [{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': text}]}


def test_lazy_rows_equal_eager_rows(tiny_llama_dir: Path) -> None:
    """The same methods give the same rows, read by index, from the end or in a loop."""
    first, second = DatasetMeta(data=ROWS), DatasetMeta(data=ROWS[:2])
    datasets = [kind(first) for kind in (Dataset, LazyDataset)]
    for dataset in datasets:
        dataset.add_dataset(second)
        for meta in (first, second):
            dataset.map(SelfCognitionProcessor('a', 'b'), meta)
        dataset.mix_dataset(interleave=True)
        dataset.set_template('Template', model_id=str(tiny_llama_dir))
        dataset.check()
        dataset.encode()
    eager, lazy = datasets
    assert len(eager) == len(lazy) == 7
    for eager_row, lazy_row in zip(eager, lazy, strict=True):
        assert list(eager_row) == list(lazy_row)
        np.testing.assert_array_equal(eager_row['input_ids'], lazy_row['input_ids'])
        np.testing.assert_array_equal(eager_row['labels'], lazy_row['labels'])
    np.testing.assert_array_equal(eager[-1]['input_ids'], lazy[-1]['input_ids'])


def test_map_runs_on_each_access() -> None:
    """A row is mapped only when it is read."""
    seen: list[int] = []

    def record(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        seen.extend(columns['x'])
        return columns

    dataset = LazyDataset(DatasetMeta(data=[{'x': i} for i in range(5)]))
    dataset.map(record)
    assert seen == []
    assert dataset[3] == {'x': 3}
    assert seen == [3]


def test_filter_runs_immediately_on_mapped_rows() -> None:
    """A filter receives the results of earlier steps; later steps receive only the rows that it accepted."""
    dataset = LazyDataset(DatasetMeta(data=[{'x': i} for i in range(6)]))
    dataset.map(lambda columns: {'x': [value * 10 for value in columns['x']]})
    dataset.filter(lambda row: row['x'] >= 30)
    dataset.map(lambda columns: {'x': [value + 1 for value in columns['x']]})
    assert len(dataset) == 3
    assert [row['x'] for row in dataset] == [31, 41, 51]


def test_split_is_refused_when_the_template_is_set(tiny_llama_dir: Path) -> None:
    """`set_template` refuses the strategy 'split', and so does `encode` if it receives a template."""
    dataset = LazyDataset(DatasetMeta(data=[chat('a')]))
    with pytest.raises(DatasetError, match='split'):
        dataset.set_template('Template', model_id=str(tiny_llama_dir), truncation_strategy='split')
    assert dataset.template is None
    eager = Dataset(DatasetMeta(data=[chat('a')]))
    eager.set_template('Template', model_id=str(tiny_llama_dir), truncation_strategy='split')
    with_template = LazyDataset(DatasetMeta(data=[chat('a')]), template=eager.template)
    with pytest.raises(DatasetError, match='split'):
        with_template.encode()


def test_invalid_rows_raise_on_access(tiny_llama_dir: Path) -> None:
    """Reading an invalid row raises an error with its index; other rows can be read."""
    rows = [chat('a'), {'messages': []}, chat('x' * 200), {'messages': [{'role': 'user', 'content': 'u'}]}]
    dataset = LazyDataset(DatasetMeta(data=rows))
    dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=100, truncation_strategy='delete')
    assert dataset.check() == []
    assert dataset.encode() == []
    assert len(dataset[0]['input_ids'])
    for index in (1, 2, 3):
        with pytest.raises(InvalidExample) as caught:
            dataset[index]
        assert caught.value.row_index == index


def test_too_long_row_is_refused_without_check(tiny_llama_dir: Path) -> None:
    """Reading a row that is too long, which 'delete' would remove, raises an error."""
    dataset = LazyDataset(DatasetMeta(data=[chat('x' * 200)]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=100, truncation_strategy='delete')
    dataset.encode()
    with pytest.raises(InvalidExample, match='max_length'):
        dataset[0]


def test_steps_that_do_not_map_one_to_one_are_refused() -> None:
    """Reading a row raises an error if the preprocessor returns two rows for it or fails."""
    dataset = LazyDataset(DatasetMeta(data=[{'x': 1}, {'y': 2}]))
    dataset.map(lambda columns: {name: values * 2 for name, values in columns.items()})
    with pytest.raises(InvalidExample):
        dataset[0]
    with_invalid_row = LazyDataset(DatasetMeta(data=[*ROWS, {'query': 'q'}]))
    with_invalid_row.map('SelfCognitionProcessor', init_args={'model_name': 'a', 'model_author': 'b'})
    with pytest.raises(InvalidRow) as caught:
        with_invalid_row[5]
    assert caught.value.row_index == 5


def test_cast_column_and_indexing() -> None:
    """`cast_column` applies to each row, `decode=False` keeps stored values, and invalid indices raise IndexError."""
    dataset = LazyDataset(DatasetMeta(data={'x': ['1', '2']}))
    dataset.cast_column('x', decode=False)
    dataset.cast_column('x', int)
    assert [row['x'] for row in dataset] == [1, 2]
    assert dataset[1:] == [dataset[-1]] == [{'x': 2}]
    with pytest.raises(IndexError):
        dataset[2]
    with pytest.raises(DatasetError):
        dataset.cast_column('x', True)


def test_refused_rows_name_their_part_and_step() -> None:
    """A refused row has the index of its part and the number of later steps, which do not include filters."""
    metas = [DatasetMeta(data=[{'x': value} for value in values]) for values in ([1, 2, 0], [3, 4])]
    dataset = LazyDataset()
    for meta in metas:
        dataset.add_dataset(meta)
    dataset.map(_refuse(5), metas[0])
    dataset.filter(lambda row: row['x'] > 0, metas[0])
    dataset.map(_refuse(2), metas[0])
    dataset.map(_refuse(3), metas[1])
    dataset.mix_dataset(interleave=False)
    dataset.map(_refuse(4))
    dataset.map(_refuse(0))
    items = [dataset.item(index) for index in range(-4, 0)]
    refused = [(str(item.error), item.part, item.later_steps) for item in items if isinstance(item, RefusedRow)]
    assert (items[0], refused) == ({'x': 1}, [('2', 0, 2), ('3', 1, 2), ('4', 0, 1)])


def _refuse(value: int) -> Callable[[Any], Any]:
    """Return a preprocessor that refuses a value."""

    def refuse(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        if value in columns['x']:
            raise ValueError(str(value))
        return columns

    return refuse
