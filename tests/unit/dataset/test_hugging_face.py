"""Rows come from Hugging Face `datasets` without a copy, and go back; the library is the real one."""

import json
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import datasets
import pyarrow as pa
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


@pytest.fixture(autouse=True)
def _is_quiet() -> Iterator[None]:
    """Show no progress bars of the library."""
    datasets.disable_progress_bars()
    yield
    datasets.enable_progress_bars()


def theirs() -> datasets.Dataset:
    """The chats as the library holds them."""
    return datasets.Dataset.from_list(CHATS)


def address_of(table: Any) -> int:
    """Return where the numbers of a table are in memory."""
    return table.column('number').chunk(0).buffers()[1].address


@pytest.mark.parametrize('kind', KINDS)
def test_rows_of_every_form_are_the_same(kind: Any) -> None:
    """A table, one that was shuffled, a stream, and one split of several."""
    given = theirs()
    shuffled = given.shuffle(seed=3)
    assert list(kind(DatasetMeta(data=given))) == CHATS
    assert list(kind(DatasetMeta(data=given.to_iterable_dataset()))) == CHATS
    assert [row['number'] for row in kind(DatasetMeta(data=shuffled))] == shuffled['number'][:]
    splits = datasets.DatasetDict(train=given.select(range(2)), test=given)
    assert list(kind(DatasetMeta(data=splits, split='test'))) == CHATS
    with pytest.raises(DatasetError, match='train, test'):
        list(kind(DatasetMeta(data=splits, split='dev')))


def test_table_is_shared_there_and_back() -> None:
    """Neither taking the rows, nor a slice of them, nor giving them back copies what is in memory."""
    given = theirs()
    whole, part = Dataset(DatasetMeta(data=given)), LazyDataset(DatasetMeta(data=given, data_slice=slice(0, 3)))
    for dataset in (whole, part):
        back = dataset.to_hf()
        assert address_of(back.data.table) == address_of(given.data.table)
        assert back.features == given.features
        assert back.to_list() == CHATS[: len(dataset)]


def test_given_rows_are_read_by_index_and_slice() -> None:
    """As a list is: from the end as well, and out of range is an IndexError."""
    dataset = Dataset(DatasetMeta(data=theirs(), data_slice=[5, 2, -1, 9]))
    assert [dataset[index]['number'] for index in (0, 1, -1)] == [5, 2, 6]
    assert [row['number'] for row in dataset[1:]] == [2, 6]
    with pytest.raises(IndexError):
        dataset[3]


def test_chosen_columns_are_all_there_are() -> None:
    """What a format hides stays hidden; a transform, which is no part of the rows, is refused."""
    given = theirs()
    given.set_format(columns=['number'])
    assert Dataset(DatasetMeta(data=given))[2] == {'number': 2}
    given.set_transform(lambda rows: rows)
    with pytest.raises(DatasetError, match='set_transform'):
        Dataset(DatasetMeta(data=given))


@pytest.mark.parametrize('kind', KINDS)
def test_verbs_work_on_given_rows(kind: Any, tiny_llama_dir: Path) -> None:
    """Mixed, mapped, filtered and encoded, they are what the same rows in a list become."""
    encoded = []
    for data in (CHATS, theirs()):
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


def test_encoded_rows_go_back_as_columns(tiny_llama_dir: Path) -> None:
    """Token features become lists that the library trains on as well."""
    dataset = Dataset(DatasetMeta(data=theirs()))
    dataset.set_template('Template', model_id=str(tiny_llama_dir))
    dataset.encode()
    back = dataset.to_hf()
    assert back.num_rows == 7
    assert back['input_ids'][4] == list(dataset[4]['input_ids'])


def test_streams_go_back_as_streams(tiny_llama_dir: Path) -> None:
    """Each iteration of theirs is a pass of ours, also of packs without end."""
    ours = IterableDataset(DatasetMeta(data=theirs()))
    ours.map(lambda columns: {'number': [number + 1 for number in columns['number']]})
    back = ours.to_hf()
    assert isinstance(back, datasets.IterableDataset)
    for _ in range(2):
        assert [row['number'] for row in back] == list(range(1, 8))
    packs = IterablePackingDataset(DatasetMeta(data=theirs()), cyclic=True)
    packs.set_template('Template', model_id=str(tiny_llama_dir), max_length=64)
    packs.encode()
    packs.pack_dataset()
    assert len(list(islice(packs.to_hf(), 20))) == 20


@pytest.mark.parametrize('form', [lambda given: given, lambda given: given.to_iterable_dataset()])
def test_resume_is_exact_over_given_rows(form: Any) -> None:
    """A shuffled reading of a table or a stream goes on at exactly the next batch."""

    def loader() -> DataLoader:
        kind = Dataset if form(theirs()).__class__ is datasets.Dataset else IterableDataset
        return DataLoader(kind(DatasetMeta(data=form(theirs()))), batch_size=2, shuffle=True, seed=5)

    whole = loader()
    batches = iter(whole)
    next(batches)
    state, rest = whole.get_state(), list(batches)
    again = loader()
    again.resume_from_checkpoint(state)
    assert list(again) == rest
    assert len(rest) == 3


@pytest.mark.parametrize('kind', KINDS)
def test_saved_folders_are_read_without_the_library(kind: Any, tmp_path: Path) -> None:
    """Of one dataset in several files, and of several splits."""
    theirs().save_to_disk(tmp_path / 'one', num_shards=3)
    datasets.DatasetDict(train=theirs(), test=theirs().select([4])).save_to_disk(tmp_path / 'two')
    assert list(kind(DatasetMeta(str(tmp_path / 'one')))) == CHATS
    assert list(kind(DatasetMeta(str(tmp_path / 'two')))) == CHATS
    assert list(kind(DatasetMeta(str(tmp_path / 'two'), split='test'))) == [CHATS[4]]
    with pytest.raises(DatasetError, match='train, test'):
        kind(DatasetMeta(str(tmp_path / 'two'), split='dev'))
    for name in ('one', 'two'):
        with pytest.raises(DatasetError, match='main'):
            kind(DatasetMeta(str(tmp_path / name), subset_name='main'))


def test_a_saved_split_is_not_taken_for_another(tmp_path: Path) -> None:
    """A dataset saved alone knows which split it was; whoever names none gets what was saved."""
    for name, split in {'of_test': datasets.Split.TEST, 'of_none': None}.items():
        datasets.Dataset.from_list(CHATS, split=split).save_to_disk(tmp_path / name)
        assert list(Dataset(DatasetMeta(str(tmp_path / name)))) == CHATS
    assert list(Dataset(DatasetMeta(str(tmp_path / 'of_test'), split='test'))) == CHATS
    for name, split in {'of_test': 'dev', 'of_none': 'test'}.items():
        with pytest.raises(DatasetError, match=split):
            Dataset(DatasetMeta(str(tmp_path / name), split=split))


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    """A file that is gone, and one that holds something else."""
    theirs().save_to_disk(tmp_path / 'one')
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


def test_arrow_files_are_written_for_the_library(tmp_path: Path) -> None:
    """What `save_as` writes is what `from_file` reads, and both kinds of Arrow files are read here."""
    path = tmp_path / 'rows.arrow'
    Dataset(DatasetMeta(data=CHATS)).save_as(path, batch_size=2)
    assert datasets.Dataset.from_file(str(path)).to_list() == CHATS
    assert list(LazyDataset(DatasetMeta(str(path)))) == list(IterableDataset(DatasetMeta(str(path)))) == CHATS
    table = pa.Table.from_pylist(CHATS)
    with pa.ipc.new_file(str(tmp_path / 'indexed.arrow'), table.schema) as writer:
        writer.write_table(table)
    assert list(Dataset(DatasetMeta(str(tmp_path / 'indexed.arrow')))) == CHATS


def test_rows_that_can_be_read_once_are_no_stream() -> None:
    """The second pass over them would be empty without a word."""
    with pytest.raises(DatasetError, match='once'):
        IterableDataset(DatasetMeta(data=iter(CHATS)))
