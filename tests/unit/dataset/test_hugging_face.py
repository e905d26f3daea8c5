"""Rows are converted from and to the Hugging Face library `datasets` without a copy of the table."""

import json
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from twinkle.dataloader import DataLoader
from twinkle.dataset import (
    Dataset,
    DatasetError,
    DatasetMeta,
    IterableDataset,
    IterablePackingDataset,
    LazyDataset,
    UnreadableFile,
)

CHATS = [
    {'messages': [{'role': 'user', 'content': f'q{i}'}, {'role': 'assistant', 'content': 'a' * i}], 'number': i}
    for i in range(7)
]
KINDS = [Dataset, LazyDataset, IterableDataset]


def hf_dataset() -> datasets.Dataset:
    """Return the chats as a dataset of the library."""
    return datasets.Dataset.from_list(CHATS)


def address_of(table: Any) -> int:
    """Return the memory address of the numbers in a table."""
    return table.column('number').chunk(0).buffers()[1].address


@pytest.mark.parametrize('kind', KINDS)
def test_all_kinds_of_hf_datasets_are_read(kind: Any) -> None:
    """Datasets, shuffled datasets, streams and single splits give their rows; an unknown split is refused."""
    source = hf_dataset()
    shuffled = source.shuffle(seed=3)
    assert list(kind(DatasetMeta(data=source))) == CHATS
    assert list(kind(DatasetMeta(data=source.to_iterable_dataset()))) == CHATS
    assert [row['number'] for row in kind(DatasetMeta(data=shuffled))] == shuffled['number'][:]
    splits = datasets.DatasetDict(train=source.select(range(2)), test=source)
    assert list(kind(DatasetMeta(data=splits, split='test'))) == CHATS
    with pytest.raises(DatasetError, match='train, test'):
        list(kind(DatasetMeta(data=splits, split='dev')))


def test_tables_are_not_copied() -> None:
    """Rows that are read, sliced or converted back use the memory of the original table."""
    source = hf_dataset()
    whole, part = Dataset(DatasetMeta(data=source)), LazyDataset(DatasetMeta(data=source, data_slice=slice(0, 3)))
    for dataset in (whole, part):
        returned = dataset.to_hf()
        assert address_of(returned.data.table) == address_of(source.data.table)
        assert returned.features == source.features
        assert returned.to_list() == CHATS[: len(dataset)]


def test_given_rows_are_read_by_index_and_slice() -> None:
    """Rows are read by index, from the end and by slice, and an index out of range raises IndexError."""
    dataset = Dataset(DatasetMeta(data=hf_dataset(), data_slice=[5, 2, -1, 9]))
    assert [dataset[index]['number'] for index in (0, 1, -1)] == [5, 2, 6]
    assert [row['number'] for row in dataset[1:]] == [2, 6]
    with pytest.raises(IndexError):
        dataset[3]


def test_formats_are_applied_and_transforms_refused() -> None:
    """Columns that a format hides stay hidden, and a dataset with a transform is refused."""
    source = hf_dataset()
    source.set_format(columns=['number'])
    assert Dataset(DatasetMeta(data=source))[2] == {'number': 2}
    source.set_transform(lambda rows: rows)
    with pytest.raises(DatasetError, match='set_transform'):
        Dataset(DatasetMeta(data=source))


@pytest.mark.parametrize('kind', KINDS)
def test_methods_give_the_same_rows_as_for_a_list(kind: Any, tiny_llama_dir: Path) -> None:
    """Mixing, mapping, filtering and encoding give the same rows as for a list of the same data."""
    encoded = []
    for data in (CHATS, hf_dataset()):
        dataset = kind(DatasetMeta(data=data))
        dataset.add_dataset(DatasetMeta(data=data, data_slice=range(2)))
        dataset.mix_dataset(interleave=True)
        dataset.map(lambda columns: {**columns, 'double': [2 * number for number in columns['number']]})
        dataset.filter(lambda row: row['number'] != 3)
        dataset.set_template('Template', model_id=str(tiny_llama_dir))
        dataset.encode(batched=True)
        encoded.append([(row['double'], list(row['input_ids']), list(row['labels'])) for row in dataset])
    assert encoded[0] == encoded[1]
    assert len(encoded[0]) == 8


def test_encoded_rows_are_converted(tiny_llama_dir: Path) -> None:
    """Token features become columns of lists."""
    dataset = Dataset(DatasetMeta(data=hf_dataset()))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    dataset.encode()
    returned = dataset.to_hf()
    assert returned.num_rows == 7
    assert returned['input_ids'][4] == list(dataset[4]['input_ids'])


def test_streams_are_converted_to_streams(tiny_llama_dir: Path) -> None:
    """Each iteration over a converted stream reads the dataset again; endless packs can be converted too."""
    source = IterableDataset(DatasetMeta(data=hf_dataset()))
    source.map(lambda columns: {'number': [number + 1 for number in columns['number']]})
    returned = source.to_hf()
    assert isinstance(returned, datasets.IterableDataset)
    for _ in range(2):
        assert [row['number'] for row in returned] == list(range(1, 8))
    packs = IterablePackingDataset(DatasetMeta(data=hf_dataset()), cyclic=True)
    packs.set_template('Template', model_id=str(tiny_llama_dir), max_length=64)
    packs.encode()
    packs.pack_dataset()
    assert len(list(islice(packs.to_hf(), 20))) == 20


@pytest.mark.parametrize('form', [lambda source: source, lambda source: source.to_iterable_dataset()])
def test_resume_continues_at_the_next_batch(form: Any) -> None:
    """A shuffled loader over a table or a stream resumes exactly at the next batch."""

    def loader() -> DataLoader:
        kind = Dataset if form(hf_dataset()).__class__ is datasets.Dataset else IterableDataset
        return DataLoader(kind(DatasetMeta(data=form(hf_dataset()))), batch_size=2, shuffle=True, seed=5)

    whole = loader()
    batches = iter(whole)
    next(batches)
    state, remaining = whole.get_state(), list(batches)
    resumed = loader()
    resumed.resume_from_checkpoint(state)
    assert list(resumed) == remaining
    assert len(remaining) == 3


@pytest.mark.parametrize('kind', KINDS)
def test_saved_folders_are_read(kind: Any, tmp_path: Path) -> None:
    """Folders of `save_to_disk` with one dataset or with several splits are read."""
    hf_dataset().save_to_disk(tmp_path / 'one', num_shards=3)
    datasets.DatasetDict(train=hf_dataset(), test=hf_dataset().select([4])).save_to_disk(tmp_path / 'two')
    assert list(kind(DatasetMeta(str(tmp_path / 'one')))) == CHATS
    assert list(kind(DatasetMeta(str(tmp_path / 'two')))) == CHATS
    assert list(kind(DatasetMeta(str(tmp_path / 'two'), split='test'))) == [CHATS[4]]
    with pytest.raises(DatasetError, match='train, test'):
        kind(DatasetMeta(str(tmp_path / 'two'), split='dev'))
    for name in ('one', 'two'):
        with pytest.raises(DatasetError, match='main'):
            kind(DatasetMeta(str(tmp_path / name), subset_name='main'))


def test_a_saved_split_is_checked(tmp_path: Path) -> None:
    """A dataset that was saved alone can be read as 'train' or as its own split, but not as another split."""
    for name, split in {'of_test': datasets.Split.TEST, 'of_none': None}.items():
        datasets.Dataset.from_list(CHATS, split=split).save_to_disk(tmp_path / name)
        assert list(Dataset(DatasetMeta(str(tmp_path / name)))) == CHATS
    assert list(Dataset(DatasetMeta(str(tmp_path / 'of_test'), split='test'))) == CHATS
    for name, split in {'of_test': 'dev', 'of_none': 'test'}.items():
        with pytest.raises(DatasetError, match=split):
            Dataset(DatasetMeta(str(tmp_path / name), split=split))


def test_damaged_folders_are_refused(tmp_path: Path) -> None:
    """A saved folder without rows is refused. For a missing or invalid file, the error names the file."""
    hf_dataset().save_to_disk(tmp_path / 'one')
    file = next((tmp_path / 'one').glob('*.arrow'))
    file.write_bytes(b'nothing of the kind')
    with pytest.raises(UnreadableFile, match=file.name):
        Dataset(DatasetMeta(str(tmp_path / 'one')))
    file.unlink()
    with pytest.raises(DatasetError, match=file.name):
        Dataset(DatasetMeta(str(tmp_path / 'one')))
    for text in ('{', '[]', '{}', '{"_data_files": "all"}', '{"_data_files": ["a"]}'):
        (tmp_path / 'one' / 'state.json').write_text(text)
        with pytest.raises(DatasetError, match=r'state\.json'):
            Dataset(DatasetMeta(str(tmp_path / 'one')))
    for state in ({'_data_files': []}, {'_data_files': [], '_indices_data_files': [{'filename': 'indices.arrow'}]}):
        (tmp_path / 'one' / 'state.json').write_text(json.dumps(state))
        with pytest.raises(DatasetError, match=r'rows'):
            Dataset(DatasetMeta(str(tmp_path / 'one')))


def test_arrow_files_are_compatible_with_the_library(tmp_path: Path) -> None:
    """`datasets.Dataset.from_file` reads files of `save_as`, and Twinkle reads both Arrow formats."""
    path = tmp_path / 'rows.arrow'
    Dataset(DatasetMeta(data=CHATS)).save_as(path, batch_size=2)
    assert datasets.Dataset.from_file(str(path)).to_list() == CHATS
    assert list(LazyDataset(DatasetMeta(str(path)))) == list(IterableDataset(DatasetMeta(str(path)))) == CHATS
    table = pa.Table.from_pylist(CHATS)
    with pa.ipc.new_file(str(tmp_path / 'indexed.arrow'), table.schema) as writer:
        writer.write_table(table)
    assert list(Dataset(DatasetMeta(str(tmp_path / 'indexed.arrow')))) == CHATS


def test_iterators_are_refused_as_streams() -> None:
    """An iterator is refused as a stream, because its second iteration would be empty."""
    with pytest.raises(DatasetError, match='once'):
        IterableDataset(DatasetMeta(data=iter(CHATS)))


def test_streams_do_not_open_paths_in_nested_media(tmp_path: Path) -> None:
    """Paths of images inside lists and objects are returned as they are stored; the files are not opened."""
    stored = {'path': str(tmp_path / 'absent.png'), 'bytes': None}
    rows = [{'images': [stored], 'parts': {'image': stored}, 'image': stored}]
    features = datasets.Features(
        {'images': datasets.List(datasets.Image()), 'parts': {'image': datasets.Image()}, 'image': datasets.Image()}
    )
    table = pa.Table.from_pylist(rows, schema=features.arrow_schema)
    pq.write_table(table, tmp_path / 'rows.parquet')
    assert list(IterableDataset(DatasetMeta(str(tmp_path / 'rows.parquet')))) == rows
