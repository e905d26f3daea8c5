"""Rows are loaded, changed atomically and encoded."""

from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from twinkle.dataset import (
    Dataset,
    DatasetError,
    DatasetMeta,
    InvalidExample,
    IterableDataset,
    LazyDataset,
    NotReady,
    PackingDataset,
)
from twinkle.preprocessor import InvalidRow, SelfCognitionProcessor

ROWS = [{'query': f'q{i}', 'response': f'{{{{NAME}}}} {i}'} for i in range(5)]


def chats(*texts: str) -> DatasetMeta:
    """Return rows with one user message and one assistant message each."""
    turns = [[{'role': 'user', 'content': 'u'}, {'role': 'assistant', 'content': text}] for text in texts]
    return DatasetMeta(data=[{'messages': turn} for turn in turns])


def encoded(folder: Path, meta: DatasetMeta, **options: Any) -> Dataset:
    """Return a dataset that is encoded with the tiny tokenizer."""
    dataset = Dataset(meta)
    dataset.set_template('Template', model_id=str(folder), **options)
    dataset.encode()
    return dataset


def test_repr_shows_rows_and_columns(tiny_llama_dir: Path) -> None:
    """The text of a dataset shows its source, rows and columns, and does not process rows of a lazy dataset."""
    source = "'rows in memory (default, train)'"
    dataset = Dataset(DatasetMeta(data=ROWS))
    assert repr(dataset) == f"Dataset({source}, rows=5, columns=['query', 'response'], is_encoded=False)"
    dataset.add_dataset(DatasetMeta(data=ROWS))
    assert repr(dataset) == 'Dataset(2 datasets, not mixed)'
    assert repr(Dataset(DatasetMeta(data=[]))) == f'Dataset({source}, rows=0, columns=[], is_encoded=False)'
    assert 'is_encoded=True' in repr(encoded(tiny_llama_dir, chats('a')))
    lazy = LazyDataset(DatasetMeta(data=ROWS))
    lazy.map(lambda columns: columns['missing'])
    assert repr(lazy) == f'LazyDataset({source}, rows=5, is_encoded=False)'
    assert repr(IterableDataset(DatasetMeta(data=ROWS))) == f'IterableDataset({source}, is_encoded=False)'
    assert repr(Dataset()) == 'Dataset(0 datasets, not mixed)'


def test_template_may_be_set_before_or_after_map(tiny_llama_dir: Path) -> None:
    """Setting the template before or after `map` gives the same tokens."""
    first, second = Dataset(DatasetMeta(data=ROWS)), Dataset(DatasetMeta(data=ROWS))
    first.set_template('Qwen3_5Template', model_id=str(tiny_llama_dir), max_length=128)
    first.map(SelfCognitionProcessor('a', 'b'))
    second.map('SelfCognitionProcessor', init_args={'model_name': 'a', 'model_author': 'b'})
    second.set_template('Qwen3_5Template', model_id=str(tiny_llama_dir), max_length=128)
    for dataset in (first, second):
        dataset.encode(batched=True, load_from_cache_file=False)
    assert [list(row['input_ids']) for row in first] == [list(row['input_ids']) for row in second]


def test_encoded_rows_keep_their_other_columns(tiny_llama_dir: Path) -> None:
    """Columns that are not part of the chat remain in the encoded row."""
    rows = [{'messages': [{'role': 'user', 'content': 'u'}], 'target': 3}]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    dataset.encode(add_generation_prompt=True)
    assert dataset[0]['target'] == 3
    assert 'labels' not in dataset[0]


@pytest.mark.parametrize('name', ['rows.csv', 'folder/rows.JSONL', 'rows.parquet'])
def test_name_of_a_missing_file_is_no_hub_dataset(name: str) -> None:
    """An id with the suffix of a data file is treated as a path, and a missing file is refused."""
    with pytest.raises(DatasetError, match=f"there is no file '{name}' in /"):
        Dataset(DatasetMeta(name))


def test_failed_map_changes_nothing() -> None:
    """The error for a row that cannot be read has the row's index in the dataset, and all rows stay unchanged."""
    rows = [*ROWS, {'query': 'q'}]
    dataset = Dataset(DatasetMeta(data=rows))
    with pytest.raises(InvalidRow) as caught:
        dataset.map(SelfCognitionProcessor('a', 'b'))
    assert caught.value.row_index == 5
    assert [dict(row) for row in dataset] == rows


def test_malformed_chat_is_named_by_row_and_field(tiny_llama_dir: Path) -> None:
    """The error of `encode` names the row and the field, and no row is encoded."""
    rows = [dict(row) for row in Dataset(chats('a', 'b', 'c'))]
    rows[2]['messages'] = [{'role': 'user', 'content': 'u'}, {'role': 'robot', 'content': 'x'}]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    with pytest.raises(InvalidExample) as caught:
        dataset.encode()
    assert (caught.value.row_index, caught.value.field) == (2, 'messages[1].role')
    assert not dataset.is_encoded


def test_too_long_example_is_named_by_row(tiny_llama_dir: Path) -> None:
    """The error of the truncation strategy 'raise' names the first row that is too long."""
    with pytest.raises(InvalidExample) as caught:
        encoded(tiny_llama_dir, chats('a', 'x' * 200), max_length=100)
    assert caught.value.row_index == 1


def test_truncation_may_change_the_number_of_rows(tiny_llama_dir: Path) -> None:
    """'delete' removes rows, and 'split' makes several rows from one."""
    meta = chats('a', 'x' * 200)
    assert len(encoded(tiny_llama_dir, meta, max_length=100, truncation_strategy='delete')) == 1
    assert len(encoded(tiny_llama_dir, meta, max_length=100, truncation_strategy='split')) == 4


def test_check_removes_unusable_rows(tiny_llama_dir: Path) -> None:
    """`check` removes rows without labels and malformed rows, and returns the reasons."""
    rows = [*Dataset(chats('a')), {'messages': [{'role': 'user', 'content': 'u'}]}, {'messages': []}]
    dataset = Dataset(DatasetMeta(data=rows))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    problems = dataset.check()
    assert [problem.split(':')[0] for problem in problems] == ['rows[1]', 'rows[2]']
    assert len(dataset) == 1


def test_steps_out_of_order_are_refused(tiny_llama_dir: Path) -> None:
    """The error for a step that is called too early names the missing step; a step after `encode` is refused."""
    with pytest.raises(NotReady, match='set_template'):
        Dataset(chats('a')).encode()
    with pytest.raises(NotReady, match='add_dataset'):
        len(Dataset())
    dataset = encoded(tiny_llama_dir, chats('a'))
    for step in (dataset.encode, lambda: dataset.map(lambda columns: columns), dataset.check):
        with pytest.raises(NotReady, match='already encoded'):
            step()


def test_unknown_arguments_are_refused() -> None:
    """An unsupported argument raises a TypeError that names the argument."""
    with pytest.raises(TypeError, match='remove_columns'):
        Dataset(chats('a')).map(lambda columns: columns, remove_columns=['x'])


def test_filter_and_cast_change_rows() -> None:
    """`filter` removes rows, and `cast_column` converts the values of an existing column."""
    dataset = Dataset(DatasetMeta(data={'x': ['1', '2', '3']}))
    dataset.cast_column('x', int)
    dataset.filter(lambda row: row['x'] > 1)
    assert [row['x'] for row in dataset] == [2, 3]
    with pytest.raises(InvalidExample):
        dataset.cast_column('y', int)


def test_added_datasets_are_mapped_separately_and_mixed() -> None:
    """Several datasets are changed one at a time until they are mixed."""
    first, second = DatasetMeta(data=[{'x': 1}, {'x': 2}, {'x': 3}]), DatasetMeta(data=[{'x': 10}])
    dataset = Dataset(first)
    dataset.add_dataset(second)
    with pytest.raises(NotReady, match='mix_dataset'):
        len(dataset)
    with pytest.raises(NotReady, match='dataset_meta'):
        dataset.map(lambda columns: columns)
    with pytest.raises(DatasetError):
        dataset.map(lambda columns: columns, DatasetMeta(data=[]))
    dataset.map(lambda columns: {'x': [value + 1 for value in columns['x']]}, second)
    dataset.mix_dataset(interleave=True)
    assert [row['x'] for row in dataset] == [1, 11, 2, 3]


def test_slices_select_existing_rows() -> None:
    """Indices past the end are skipped, and the order of the indices is kept."""
    rows = [{'x': i} for i in range(5)]
    selected = {
        name: [row['x'] for row in Dataset(DatasetMeta(data=rows, data_slice=data_slice))]
        for name, data_slice in {'range': range(1000), 'slice': slice(1, 3), 'list': [4, 0]}.items()
    }
    assert selected == {'range': [0, 1, 2, 3, 4], 'slice': [1, 2], 'list': [4, 0]}


def test_meta_needs_exactly_one_source() -> None:
    """A meta with no source or with two sources is refused."""
    with pytest.raises(ValueError, match='dataset_id or data'):
        DatasetMeta()
    with pytest.raises(ValueError, match='dataset_id or data'):
        DatasetMeta('x', data=[])


def test_packs_keep_every_sample_separate(tiny_llama_dir: Path) -> None:
    """Each sample is completely in one pack, its positions restart at 0, and its last label is ignored."""
    meta = chats(*('x' * (3 * i % 17) for i in range(20)))
    dataset = PackingDataset(meta)
    dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=120)
    dataset.encode()
    singles = sorted(tuple(row['input_ids']) for row in dataset)
    dataset.pack_dataset()
    samples: list[tuple[int, ...]] = []
    for pack in dataset:
        assert len(pack['input_ids']) == pack['length'] <= 120
        starts = [*np.flatnonzero(np.asarray(pack['position_ids']) == 0), pack['length']]
        for begin, end in pairwise(starts):
            samples.append(tuple(pack['input_ids'][begin:end]))
            assert pack['labels'][end - 1] == -100
            assert list(pack['position_ids'][begin:end]) == list(range(end - begin))
        assert len(pack['samples']) == len(starts) - 1
    assert sorted(samples) == singles
    assert len(dataset) < len(singles)
    with pytest.raises(NotReady):
        dataset.pack_dataset()


def test_prompts_are_not_packed(tiny_llama_dir: Path) -> None:
    """Prompts without labels are refused for packing."""
    dataset = PackingDataset(DatasetMeta(data=[{'messages': [{'role': 'user', 'content': 'u'}]}]))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    with pytest.raises(NotReady):
        dataset.pack_dataset()
    dataset.encode(add_generation_prompt=True)
    with pytest.raises(NotReady):
        dataset.pack_dataset()


def test_encode_reports_problems(tiny_llama_dir: Path) -> None:
    """`encode` reports examples that were truncated or removed, or that have no labels."""
    rows = [*Dataset(chats('a', 'x' * 200)), {'messages': [{'role': 'user', 'content': 'u'}]}]
    reports: dict[str, list[str]] = {}
    for strategy in ('delete', 'left'):
        dataset = Dataset(DatasetMeta(data=rows))
        dataset.set_template('Template', model_id=str(tiny_llama_dir), max_length=100, truncation_strategy=strategy)
        reports[strategy] = dataset.encode()
    assert [line.split(':')[0] for line in reports['delete']] == [
        '1 of 3 examples were left out',
        '1 of 3 examples have no labels',
    ]
    assert reports['left'][0].startswith('1 of 3 examples were cut')
