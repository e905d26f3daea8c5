"""Rows of files are tables of the library `datasets`: several processes change them, and results are cached."""

import json
import os
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest

from twinkle.dataset import Dataset, DatasetError, DatasetMeta, IterableDataset, PackingDataset
from twinkle.preprocessor import InvalidRow
from twinkle.preprocessor.quality import DedupFilter

CHATS = [
    {
        'messages': [{'role': 'user', 'content': f'q{i}'}, {'role': 'assistant', 'content': 'a' * (i % 11 * 10)}],
        'number': i,
    }
    for i in range(40)
]


def written(path: Path, rows: list[Any]) -> DatasetMeta:
    """Write rows as JSON lines, and return their description."""
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))
    return DatasetMeta(str(path))


class Doubled:
    """Doubles numbers, and adds a line to a file for each call."""

    def __init__(self, calls: Path) -> None:
        self.calls = calls

    def __call__(self, columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
        """Return the columns with doubled numbers and the process that computed them."""
        with self.calls.open('a') as file:
            file.write('call\n')
        numbers = columns['number']
        return {**columns, 'number': [2 * number for number in numbers], 'process': [os.getpid()] * len(numbers)}


def is_even(row: dict[str, Any]) -> bool:
    """Return whether the number of a row is even."""
    return row['number'] % 2 == 0


def refuse_thirty(columns: dict[str, list[Any]]) -> dict[str, list[Any]]:
    """Return the columns, or refuse the row with the number 30."""
    if 30 in columns['number']:
        raise InvalidRow('number', 'must not be 30', row_index=columns['number'].index(30))
    return columns


def encoded(dataset: Any, folder: Path, **options: Any) -> list[str]:
    """Encode a dataset with the tiny tokenizer, and return its reports."""
    dataset.set_template('Template', model_id=str(folder), max_length=100, truncation_strategy='delete')
    return dataset.encode(**options)


def features(dataset: Any) -> list[dict[str, list[int]]]:
    """Return the token columns of all rows as lists, after checking their type."""
    names = ('input_ids', 'labels', 'position_ids', 'attention_mask')
    found = [{name: row[name] for name in names if name in row} for row in dataset]
    assert {column.dtype for row in found for column in row.values()} == {np.dtype(np.int32)}
    return [{name: column.tolist() for name, column in row.items()} for row in found]


@pytest.mark.parametrize('is_file', [True, False])
def test_processes_give_the_same_rows(tmp_path: Path, tiny_llama_dir: Path, *, is_file: bool) -> None:
    """`map`, `filter`, `check` and `encode` give the same rows and reports in two other processes."""
    meta = written(tmp_path / 'rows.jsonl', CHATS) if is_file else DatasetMeta(data=CHATS)
    results: list[Any] = []
    for count in (1, 2):
        dataset = Dataset(meta)
        dataset.map(Doubled(tmp_path / 'calls'), num_proc=count, load_from_cache_file=False)
        assert all((row['process'] == os.getpid()) == (count == 1) for row in dataset)
        dataset.filter(is_even, num_proc=count)
        dataset.set_template('Template', model_id=str(tiny_llama_dir))
        problems = dataset.check(num_proc=count)
        report = encoded(dataset, tiny_llama_dir, num_proc=count)
        results.append((problems, report, features(dataset), [row['messages'] for row in dataset]))
    assert results[0] == results[1]
    assert results[0][1]


def test_packs_of_processes_equal_those_of_one(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """Packs of rows from files are the same with one and two processes, and the same as packs of a list."""
    packs: list[Any] = []
    for meta, count in [(DatasetMeta(data=CHATS), 1), (DatasetMeta(data=CHATS), 2), *[
        (written(tmp_path / 'rows.jsonl', CHATS), count) for count in (1, 2)
    ]]:  # fmt: skip
        dataset = PackingDataset(meta, packing_num_proc=count)
        encoded(dataset, tiny_llama_dir)
        dataset.pack_dataset()
        packs.append((features(dataset), [row['length'] for row in dataset], [len(row['samples']) for row in dataset]))
    assert packs[0] == packs[1] == packs[2] == packs[3]
    assert len(packs[0][0]) < len(CHATS)


def test_results_are_found_in_the_cache(tmp_path: Path, tiny_llama_dir: Path) -> None:
    """The same function and file give stored rows and reports; `load_from_cache_file=False` computes them again."""
    calls, meta, reports = tmp_path / 'calls', written(tmp_path / 'rows.jsonl', CHATS), []
    for index, options in enumerate([{}, {}, {'load_from_cache_file': False}]):
        dataset = Dataset(meta)
        dataset.map(Doubled(calls), **options)
        assert dataset[3]['number'] == 6
        assert len(calls.read_text().splitlines()) == [1, 1, 2][index]
        reports.append(encoded(dataset, tiny_llama_dir))
        assert dataset.to_hf().cache_files
    assert reports[0] == reports[1] == reports[2] != []


def test_filters_that_count_rows_see_all_in_order(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A filter with state ignores `num_proc` with a warning, and is never answered from the cache."""
    for _ in range(2):
        caplog.clear()
        dataset = Dataset(written(tmp_path / 'rows.jsonl', [CHATS[0], CHATS[1], CHATS[0]]))
        dataset.filter(DedupFilter(), num_proc=2)
        assert len(dataset) == 2
        texts = [record.getMessage() for record in caplog.records]
        assert [('num_proc' in text, 'DedupFilter' in text) for text in texts[:1]] == [(True, True)]
        assert len(texts) == 2


@pytest.mark.parametrize('count', [1, 2])
def test_error_of_a_process_names_the_row(tmp_path: Path, count: int) -> None:
    """An error in any process keeps its type and the index of the row, and no row changes."""
    dataset = Dataset(written(tmp_path / 'rows.jsonl', CHATS))
    with pytest.raises(InvalidRow) as caught:
        dataset.map(refuse_thirty, num_proc=count, batch_size=7)
    assert caught.value.row_index == 30
    assert [row['number'] for row in dataset] == list(range(40))


def test_fields_of_objects_are_kept_as_written(tmp_path: Path) -> None:
    """Objects of JSON lines keep exactly their fields, and texts that look like times stay texts."""
    rows: list[Any] = [{'messages': [{'role': 'user', 'content': 'q'}], 'when': '2026-01-31 12:00:00'}] * 3
    rows += [{'messages': [{'role': 'user', 'content': [{'type': 'text', 'text': 'q'}], 'weight': 0}], 'when': 'x'}]
    meta = written(tmp_path / 'rows.jsonl', rows)
    assert list(Dataset(meta)) == list(IterableDataset(meta)) == rows


@pytest.mark.parametrize(
    ('name', 'content', 'expected'),
    [
        ('rows.txt', 'a\nb\n', [{'text': 'a'}, {'text': 'b'}]),
        ('rows.tsv', 'x\ty\n1\tb\n', [{'x': 1, 'y': 'b'}]),
        ('rows.ndjson', '{"x": 1}\n', [{'x': 1}]),
        ('train/rows.txt', 'a\n', [{'text': 'a'}]),
    ],
)
def test_other_formats_of_the_library_are_read(tmp_path: Path, name: str, content: str, expected: list[Any]) -> None:
    """Files and folders in any format of the library are read in memory and as a stream."""
    path = tmp_path / 'data' / name
    path.parent.mkdir(parents=True)
    path.write_text(content)
    for source in (path, tmp_path / 'data'):
        assert list(Dataset(DatasetMeta(str(source)))) == expected
        assert list(IterableDataset(DatasetMeta(str(source)))) == expected
    with pytest.raises(DatasetError, match='train'):
        Dataset(DatasetMeta(str(tmp_path / 'data'), split='test'))


def test_options_of_a_readme_are_used(tmp_path: Path) -> None:
    """The options of a subset in the README, such as the separator of CSV files, are passed to the reader."""
    (tmp_path / 'a.csv').write_text('x;y\n1;2\n')
    (tmp_path / 'README.md').write_text(
        '---\nconfigs:\n- config_name: main\n  data_files: a.csv\n  sep: ";"\n  default: true\n---\n'
    )
    for subset in ('default', 'main'):
        assert list(Dataset(DatasetMeta(str(tmp_path), subset_name=subset))) == [{'x': 1, 'y': 2}]


def test_columns_that_appear_late_are_read(tmp_path: Path) -> None:
    """A column that no row of the first 10 MB has is read; a column whose type changes there names the cure."""
    rows = [{'x': number, 'text': 'a' * 100_000} for number in range(110)]
    assert [row['late'] for row in Dataset(written(tmp_path / 'rows.jsonl', [*rows, {'late': {'y': [1]}}]))][-2:] == [
        None,
        {'y': [1]},
    ]
    meta = written(tmp_path / 'types.jsonl', [*rows, {'x': 'text'}])
    with pytest.raises(DatasetError, match='features'):
        Dataset(meta)
    features = datasets.Features(x=datasets.Json(), text=datasets.Value('string'))
    typed = Dataset(DatasetMeta(meta.dataset_id, options={'features': features}))
    assert [typed[index]['x'] for index in (0, -1)] == [0, 'text']


def test_formats_that_store_types_do_not_name_the_cure_for_types(tmp_path: Path) -> None:
    """The error of a damaged JSON file names the cure for changing types, and that of a Parquet file does not."""
    (tmp_path / 'damaged.jsonl').write_text('{"x": 1}\n{"x":\n')
    (tmp_path / 'damaged.parquet').write_bytes(b'PAR1' * 10)
    for name, has_cure in (('damaged.jsonl', True), ('damaged.parquet', False)):
        with pytest.raises(DatasetError) as refused:
            Dataset(DatasetMeta(str(tmp_path / name)))
        assert ("options={'features'" in str(refused.value)) == has_cure


def test_options_of_the_library_are_passed(tmp_path: Path) -> None:
    """Options of `load_dataset` apply to files and folders, also in streams; options of other fields are refused."""
    (tmp_path / 'a.csv').write_text('x;y\n1;2\n')
    (tmp_path / 'b.txt').write_text('ignored')
    for source, options in ((tmp_path / 'a.csv', {'sep': ';'}), (tmp_path, {'sep': ';', 'data_files': 'a.csv'})):
        meta = DatasetMeta(str(source), options=options)
        assert list(Dataset(meta)) == list(IterableDataset(meta)) == [{'x': 1, 'y': 2}]
    refused: Any = ({'dataset_id': 'a.csv', 'options': {'streaming': True}}, {'data': [], 'options': {'sep': ';'}})
    for arguments in refused:
        with pytest.raises(ValueError, match='options'):
            DatasetMeta(**arguments)


def test_tables_are_mixed_without_a_copy(tmp_path: Path) -> None:
    """Mixing rows of files gives the order of mixed lists, and columns of different types are refused."""
    parts = [[{'x': i} for i in range(3)], [{'x': 10, 'y': 'b'}]]
    for interleave, expected in ((True, [0, 10, 1, 2]), (False, [0, 1, 2, 10])):
        dataset = Dataset()
        for index, rows in enumerate(parts):
            dataset.add_dataset(written(tmp_path / f'{index}.jsonl', rows))
        dataset.mix_dataset(interleave=interleave)
        assert [row['x'] for row in dataset] == expected
        assert len(dataset.to_hf().cache_files) == 2
    dataset.add_dataset(written(tmp_path / 'texts.jsonl', [{'x': 'text'}]))
    with pytest.raises(DatasetError, match='types'):
        dataset.mix_dataset()


def test_results_without_rows_or_with_mixed_types(tmp_path: Path) -> None:
    """A function may remove all rows; a column whose type differs between batches is refused without a change."""
    dataset = Dataset(written(tmp_path / 'rows.jsonl', [{'x': 1}, {'x': 2}]))
    with pytest.raises(DatasetError, match='types'):
        dataset.map(lambda columns: {'x': [[x] if x > 1 else 'text' for x in columns['x']]}, batch_size=1)
    assert list(dataset) == [{'x': 1}, {'x': 2}]
    dataset.map(lambda columns: {'x': []})
    assert list(dataset) == []
