"""Files and folders of rows are read in the layouts that are common on model hubs."""

import json
import zipfile
from contextlib import suppress
from pathlib import Path

import pytest

from twinkle.dataset import (
    Dataset,
    DatasetError,
    DatasetMeta,
    IterableDataset,
    UnreadableFile,
    find_files,
    load_rows,
    read_rows,
    write_rows,
)

ROWS = [{'a': 1, 'b': 'é, "x"\ny'}, {'a': 2, 'b': 'z'}]


CYCLE: list[object] = []
CYCLE.append(CYCLE)


def write(path: Path, rows: list[dict[str, object]]) -> None:
    """Write JSON lines and create missing folders."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(''.join(json.dumps(row) + '\n' for row in rows))


@pytest.mark.parametrize('suffix', ['jsonl', 'parquet', 'csv'])
def test_written_rows_are_read_back(tmp_path: Path, suffix: str) -> None:
    """Reading a written file gives the same rows, for every format."""
    path = tmp_path / f'rows.{suffix}'
    Dataset(DatasetMeta(data=ROWS)).save_as(path)
    assert list(read_rows(path)) == ROWS
    assert list(load_rows(DatasetMeta(str(path)))) == ROWS


def test_texts_of_csv_files_are_no_nulls(tmp_path: Path) -> None:
    """Only an empty value of a CSV file becomes None; words such as NA and null are texts."""
    path = tmp_path / 'rows.csv'
    path.write_text('a,b\nNA,1\nnull,\n')
    assert list(read_rows(path)) == [{'a': 'NA', 'b': 1}, {'a': 'null', 'b': None}]


def test_json_lists_are_read(tmp_path: Path) -> None:
    """A JSON file with a list of objects is read."""
    path = tmp_path / 'rows.json'
    path.write_text(json.dumps(ROWS))
    assert list(read_rows(path)) == ROWS


@pytest.mark.parametrize(
    ('name', 'content'),
    [
        ('a.jsonl', '{"a": 1}\n{'),
        ('a.jsonl', b'\xff\xfe\x00'),
        ('a.json', '['),
        ('a.parquet', 'nulls'),
        ('a.csv', '"'),
        ('a.xyz', 'x'),
    ],
)
def test_unreadable_files_are_refused(tmp_path: Path, name: str, content: str | bytes) -> None:
    """A file that does not have the format of its suffix raises an error that names the file."""
    path = tmp_path / name
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    with pytest.raises(UnreadableFile, match='a\\.'):
        read_rows(path)


@pytest.mark.parametrize('batch_rows', [1, 2, 1000])
@pytest.mark.parametrize('suffix', ['parquet', 'csv'])
def test_columns_of_later_rows_are_written(tmp_path: Path, suffix: str, batch_rows: int) -> None:
    """A column that first appears in a later row is written, with null in the rows that lack it."""
    path = tmp_path / f'rows.{suffix}'
    write_rows(path, [{'a': 1}, {'b': 2.5}, {}, {'c': 3, 'a': 4}], batch_rows=batch_rows)
    nulls = {'a': None, 'b': None, 'c': None}
    assert list(read_rows(path)) == [{**nulls, 'a': 1}, {**nulls, 'b': 2.5}, nulls, {**nulls, 'a': 4, 'c': 3}]


@pytest.mark.parametrize('batch_rows', [1, 1000])
@pytest.mark.parametrize('rows', [[{'a': 1}, {'a': 'x'}], [{'a': [1]}, {'a': 1}], [{}, {}]], ids=str)
def test_rows_without_uniform_columns_are_refused(
    tmp_path: Path, rows: list[dict[str, object]], batch_rows: int
) -> None:
    """Columns of mixed types and rows without columns are refused without leaving a file; JSON lines accept both."""
    path = tmp_path / 'rows.parquet'
    with pytest.raises(UnreadableFile):
        write_rows(path, rows, batch_rows=batch_rows)
    assert not path.exists()
    write_rows(path, rows, 'jsonl')
    if any(rows):
        assert list(read_rows(path, 'jsonl')) == rows


def test_nested_columns_are_not_written_as_csv(tmp_path: Path) -> None:
    """Nested columns are refused for CSV without leaving a file."""
    with pytest.raises(UnreadableFile, match='messages'):
        write_rows(tmp_path / 'rows.csv', [{'messages': [{'role': 'user'}]}])
    assert not (tmp_path / 'rows.csv').exists()


@pytest.mark.parametrize('value', [b'a', '\ud800', {1, 2}, CYCLE], ids=['bytes', 'surrogate', 'set', 'cycle'])
def test_values_that_json_cannot_represent_are_named(tmp_path: Path, value: object) -> None:
    """The error for a value that JSON lines cannot represent names the row and column, and no file is left."""
    with pytest.raises(UnreadableFile, match=r'rows\[1\]\.picture cannot be written'):
        write_rows(tmp_path / 'rows.jsonl', [{'picture': None}, {'text': 'a', 'picture': value}])
    assert list(tmp_path.iterdir()) == []


def test_split_is_found_by_file_name(tmp_path: Path) -> None:
    """Names of files and folders determine the split."""
    write(tmp_path / 'data/train-00001.jsonl', [{'x': 2}])
    write(tmp_path / 'data/train-00000.jsonl', [{'x': 1}])
    write(tmp_path / 'test/part.jsonl', [{'x': 3}])
    assert list(load_rows(DatasetMeta(str(tmp_path)))) == [{'x': 1}, {'x': 2}]
    assert list(load_rows(DatasetMeta(str(tmp_path), split='test'))) == [{'x': 3}]
    with pytest.raises(DatasetError, match='test, train'):
        load_rows(DatasetMeta(str(tmp_path), split='validation'))


def test_files_without_a_split_are_for_training(tmp_path: Path) -> None:
    """A single file of any name is the train split, and other splits are refused."""
    write(tmp_path / 'self_cognition.jsonl', [{'x': 1}])
    assert list(load_rows(DatasetMeta(str(tmp_path)))) == [{'x': 1}]
    with pytest.raises(DatasetError):
        load_rows(DatasetMeta(str(tmp_path), split='test'))


def test_subset_is_a_folder(tmp_path: Path) -> None:
    """A subset is the folder with its name inside the dataset if there is no README."""
    write(tmp_path / 'main/train.jsonl', [{'x': 1}])
    write(tmp_path / 'other/train.jsonl', [{'x': 2}])
    assert list(load_rows(DatasetMeta(str(tmp_path), subset_name='main'))) == [{'x': 1}]
    for name in ('absent', '../..'):
        with pytest.raises(DatasetError, match='main, other'):
            load_rows(DatasetMeta(str(tmp_path), subset_name=name))


def test_readme_configs_define_subsets_and_splits(tmp_path: Path) -> None:
    """The `configs` of a README define subsets and splits; the error for an unknown name lists the known names."""
    write(tmp_path / 'a.jsonl', [{'x': 1}])
    write(tmp_path / 'b.jsonl', [{'x': 2}])
    (tmp_path / 'README.md').write_text(
        '---\nconfigs:\n- config_name: main\n  default: true\n  data_files:\n  - split: train\n    path: a.jsonl\n'
        '  - split: test\n    path: [b.*]\n- config_name: plain\n  data_files: b.jsonl\n---\n# Rows\n'
    )
    assert list(load_rows(DatasetMeta(str(tmp_path)))) == [{'x': 1}]
    assert list(load_rows(DatasetMeta(str(tmp_path), subset_name='main', split='test'))) == [{'x': 2}]
    assert list(load_rows(DatasetMeta(str(tmp_path), subset_name='plain'))) == [{'x': 2}]
    with pytest.raises(DatasetError, match='main, plain'):
        load_rows(DatasetMeta(str(tmp_path), subset_name='absent'))
    with pytest.raises(DatasetError, match='test, train'):
        load_rows(DatasetMeta(str(tmp_path), split='validation'))


def test_readme_cannot_name_links_of_other_folders(tmp_path: Path) -> None:
    """A README cannot select the links to another dataset in the same cache."""
    for name in ('own', 'other'):
        (tmp_path / name).mkdir()
        (tmp_path / f'{name}.blob').write_text(json.dumps({'x': name}))
        (tmp_path / name / 'train.jsonl').symlink_to(tmp_path / f'{name}.blob')
    readme = tmp_path / 'own' / 'README.md'
    found: list[Path] = []
    for pattern in ('*.jsonl', '../other/*.jsonl'):
        readme.write_text(f'---\nconfigs:\n- config_name: default\n  data_files: "{pattern}"\n---\n')
        with suppress(DatasetError):
            found += find_files(DatasetMeta(str(tmp_path / 'own')))
    assert found == [tmp_path / 'own' / 'train.jsonl']


@pytest.mark.parametrize('dataset_class', [Dataset, IterableDataset])
def test_an_archive_without_files_is_refused(tmp_path: Path, dataset_class: type[Dataset | IterableDataset]) -> None:
    """An archive of JSON files that contains only a folder has no rows, and the error says so."""
    path = tmp_path / 'rows.jsonl.zip'
    with zipfile.ZipFile(path, 'w') as archive:
        archive.mkdir('folder')
    with pytest.raises(DatasetError, match='have no rows'):
        dataset_class(DatasetMeta(str(path)))
