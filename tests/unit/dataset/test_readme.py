"""A README names only files inside of its folder or repository."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from twinkle.dataset import Dataset, DatasetError, DatasetMeta, IterableDataset, find_files
from twinkle.dataset.readme import checked_configs, dataset_name, patterns_of

OUTSIDE = (
    '/etc/rows.jsonl',
    '\\etc\\rows.jsonl',
    '../rows.jsonl',
    'data/../../rows.jsonl',
    'data\\..\\..\\rows.jsonl',
    'file:///etc/rows.jsonl',
    'https://example.org/rows.jsonl',
    'hf://datasets/org/other/rows.jsonl',
    'zip://*.jsonl::https://example.org/rows.zip',
    '_::https://example.org/rows.zip',
    'x:rows.jsonl',
    ' http:rows.jsonl',
    '//[rows.jsonl',
    'rows\0.jsonl',
    '',
)
INSIDE = (
    'rows.jsonl',
    'data/*.jsonl',
    '**',
    './data/train-?.parquet',
    'data/2026:01/*.csv',
    '..rows/a..b.jsonl',
    '~/x',
)


@pytest.mark.parametrize('pattern', OUTSIDE)
def test_patterns_outside_are_refused(pattern: str) -> None:
    """Each place of a pattern is checked, and the refusal names the dataset, the config and the pattern."""
    places: list[dict[str, Any]] = [
        {'data_files': ['a.jsonl', pattern]},
        {'data_files': [{'split': 'train', 'path': 'a.jsonl'}, {'split': 'test', 'path': pattern}]},
        {'data_files': [{'split': 'train', 'path': ['a.jsonl', pattern]}]},
        *([{'data_files': pattern}, {'data_dir': pattern}] if pattern else []),
    ]
    for place in places:
        with pytest.raises(DatasetError) as refused:
            checked_configs(
                'README.md of org/rows', [{'config_name': 'good', 'data_files': '*'}, {'config_name': 'main', **place}]
            )
        for name in ('README.md of org/rows', "'main'", repr(pattern)):
            assert name in str(refused.value)


@pytest.mark.parametrize('pattern', INSIDE)
def test_patterns_inside_are_accepted(pattern: str) -> None:
    """Relative paths and patterns stay as they are, for each split."""
    config = {'config_name': 'main', 'data_files': [{'split': 'test', 'path': [pattern]}], 'data_dir': pattern}
    assert checked_configs('org/rows', [config]) == [config]
    assert patterns_of('org/rows', config) == {'test': [pattern]}
    assert patterns_of('org/rows', {'data_files': pattern}) == {'train': [pattern]}


@pytest.mark.parametrize(
    'configs',
    [
        'main',
        {'config_name': 'main'},
        ['main'],
        [{'config_name': ['main']}],
        [{'data_files': {'train': 'a.jsonl'}}],
        [{'data_files': 3}],
        [{'data_files': [{'split': 'train'}]}],
        [{'data_files': [{'split': ['train'], 'path': 'a.jsonl'}]}],
        [{'data_files': [None]}],
        [{'data_dir': ['data']}],
        [{'version': '../other'}],
        [{'version': '/etc'}],
        [{'version': '..'}],
        [{'version': {'major': 1}}],
    ],
)
def test_malformed_configs_are_refused(configs: Any) -> None:
    """A value of another type, and a version that is not safe in a path, is an error about the README."""
    with pytest.raises(DatasetError, match='README'):
        checked_configs('README.md of org/rows', configs)


def test_nested_aliases_are_not_expanded() -> None:
    """YAML of 1 kB whose aliases stand for 10 to the power of 60 values is refused without reading them all."""
    lines = [
        'a0: &a0 [x, x]',
        *(f'a{index}: &a{index} [{", ".join([f"*a{index - 1}"] * 10)}]' for index in range(1, 60)),
    ]
    bomb = yaml.safe_load('\n'.join(lines))['a59']
    places: list[dict[str, Any]] = [{'data_files': bomb}, {'data_dir': bomb}, {'version': bomb}, {'config_name': bomb}]
    for place in places:
        with pytest.raises(DatasetError):
            checked_configs('org/rows', [place])


@pytest.mark.parametrize('open_rows', [find_files, Dataset], ids=['service', 'library'])
def test_folders_name_only_their_files(tmp_path: Path, open_rows: Callable[[DatasetMeta], object]) -> None:
    """Absolute, invalid and malformed patterns of a folder are refused with an error, not with an exception of glob."""
    folder, other = tmp_path / 'rows', tmp_path / 'other.jsonl'
    folder.mkdir()
    for file in (folder / 'train.jsonl', other):
        file.write_text('{"x": 1}\n')
    for data_files in (str(other), '../*.jsonl', f'file://{other}', [{'split': 'train', 'path': None}]):
        front = yaml.safe_dump({'configs': [{'config_name': 'main', 'data_files': data_files}]})
        (folder / 'README.md').write_text(f'---\n{front}---\n')
        with pytest.raises(DatasetError, match=r'README\.md of rows'):
            open_rows(DatasetMeta(str(folder)))


@pytest.mark.parametrize('open_rows', [find_files, Dataset], ids=['service', 'library'])
@pytest.mark.parametrize(
    'readme',
    [
        b'---\nconfigs: [{config_name: main, data_files: test.jsonl}\n---\n',
        b'---\nconfigs: [{config_name: main, data_files: test.jsonl}]\n',
        b'\xef\xbb\xbf---\r\n# Subsets\r\nlanguage: en\r\nconfigs: [{config_name: main, data_files: a.jsonl}]\r\n',
        b'---\r\n\r\n# Rows\r\n\r\ntags:\r\n- a\r\nsize:\r\n  rows: 1\r\nconfigs:\r\n- data_files: a.jsonl\r\n',
        b'\xef\xbb\xbf\xef\xbb\xbf---\nconfigs: [{config_name: main, data_files: test.jsonl}]\n---\n',
        b'--- \ntags: [\nconfigs: [{config_name: main, data_files: test.jsonl}]\n---\n',
        b'---\nconfigs: [{config_name: main, data_files: test.jsonl}]\nlanguage: \xff\n---\n',
        b'---\nconfigs: [{config_name: main, data_files: test.jsonl}]\n1: x\n---\n',
        b'---\n- configs: [{config_name: main, data_files: test.jsonl}]\n---\n',
    ],
    ids=[
        'yaml',
        'no end',
        'no end after fields',
        'no end after lines',
        'two marks',
        'no beginning',
        'no text',
        'no name',
        'list',
    ],
)
def test_damaged_configs_select_no_other_files(
    tmp_path: Path, readme: bytes, open_rows: Callable[[DatasetMeta], object]
) -> None:
    """Configs that cannot be read are refused with their file, and the names of files are not used instead."""
    for split in ('train', 'test'):
        (tmp_path / f'{split}.jsonl').write_text('{"x": 1}\n')
    (tmp_path / 'README.md').write_bytes(readme)
    with pytest.raises(DatasetError, match=rf'README\.md of {tmp_path.name} is not valid: .*(correct|must)'):
        open_rows(DatasetMeta(str(tmp_path)))


@pytest.mark.parametrize(
    'readme',
    [
        b'# R\xe9sum\xe9\n',
        b'Text\n---\nconfigs: [\n---\n',
        b'---\ntags: [a]\n---\nconfigs: [\n',
        b'---\nlicense:\n---\nconfigs: [\n',
        b'---\n# Rows\n---\nconfigs: [\n',
        b'---\n\n# Rows\n\nAn example:\n\n```yaml\nconfigs:\n- data_files: test.jsonl\n```\n',
        b'---\nNote: one subset of\n\n```yaml\nconfigs:\n- data_files: test.jsonl\n```\n',
        b'---\nNote: these are\nconfigs with rows.\n',
    ],
    ids=['none', 'after text', 'other', 'empty field', 'empty', 'horizontal rule', 'rule and note', 'rule and word'],
)
def test_texts_without_configs_define_nothing(tmp_path: Path, readme: bytes) -> None:
    """The text of a README is not read as configs, whether it has other metadata or none."""
    for split in ('train', 'test'):
        (tmp_path / f'{split}.jsonl').write_text(f'{{"x": "{split}"}}\n')
    (tmp_path / 'README.md').write_bytes(readme)
    meta = DatasetMeta(str(tmp_path))
    assert find_files(meta) == [tmp_path / 'train.jsonl']
    assert list(Dataset(meta)) == list(IterableDataset(meta)) == [{'x': 'train'}]


def test_byte_order_mark_before_configs_is_skipped(tmp_path: Path) -> None:
    """A README with a byte order mark defines the same files for services, for the library and for streams."""
    for split in ('train', 'test'):
        (tmp_path / f'{split}.jsonl').write_text(f'{{"x": "{split}"}}\n')
    (tmp_path / 'README.md').write_text(
        '---\nconfigs: [{config_name: main, data_files: test.jsonl}]\n---\n', encoding='utf-8-sig'
    )
    meta = DatasetMeta(str(tmp_path))
    assert find_files(meta) == [tmp_path / 'test.jsonl']
    assert list(Dataset(meta)) == list(IterableDataset(meta)) == [{'x': 'test'}]


def test_long_metadata_without_an_end_is_searched_in_linear_time(tmp_path: Path) -> None:
    """A README of a million lines that could be metadata, but has no configs, is text."""
    (tmp_path / 'train.jsonl').write_text('{"x": 1}\n')
    (tmp_path / 'README.md').write_text('---\n' + '\n \na: b\n- c\n# d\n' * 200_000 + 'text')
    assert find_files(DatasetMeta(str(tmp_path))) == [tmp_path / 'train.jsonl']


def test_both_descriptions_define_subsets(tmp_path: Path) -> None:
    """The second file of descriptions replaces the configs of the README, for services as for the library."""
    for name in ('a', 'b'):
        (tmp_path / f'{name}.jsonl').write_text(f'{{"x": "{name}"}}\n')
    (tmp_path / 'README.md').write_text('---\nconfigs: [{config_name: main, data_files: a.jsonl}]\n---\n')
    (tmp_path / '.huggingface.yaml').write_text('configs: [{config_name: main, data_files: b.jsonl}]')
    meta = DatasetMeta(str(tmp_path))
    assert find_files(meta) == [tmp_path / 'b.jsonl']
    assert list(Dataset(meta)) == [{'x': 'b'}]


def test_descriptions_of_other_formats_are_checked(tmp_path: Path) -> None:
    """Files that only the library reads, and its second file of descriptions, follow the same rule."""
    (tmp_path / 'train.txt').write_text('one\n')
    description = tmp_path / '.huggingface.yaml'
    for text, error in (
        ('configs: [{config_name: main, data_files: /etc/hostname}]', 'names'),
        ('configs: [', r'\.huggingface\.yaml of .* is not YAML'),
        ('[]', 'must contain fields'),
    ):
        description.write_text(text)
        with pytest.raises(DatasetError, match=error):
            Dataset(DatasetMeta(str(tmp_path)))
    description.write_text('configs: [{config_name: main, data_files: "*.txt"}]')
    assert list(Dataset(DatasetMeta(str(tmp_path)))) == [{'text': 'one'}]


def test_names_of_cached_datasets_are_those_of_the_hub() -> None:
    """Errors name the repository, not the commit that is the name of its folder in the cache."""
    assert dataset_name(Path('/cache/datasets--org--rows/snapshots/c0ffee')) == 'org/rows'
    assert dataset_name(Path('/data/rows')) == 'rows'
