"""Ids find their folders: which place is asked first, and what is said when none has it."""

from pathlib import Path

import pytest

from twinkle.hub import (
    DatasetNotFound,
    HubError,
    HubId,
    HubUnreachable,
    ModelNotFound,
    get_model,
    resolve_dataset,
    resolve_model,
    resolve_tokenizer,
)


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Empty mirror and caches, no network."""
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path / 'mirror'))
    monkeypatch.setenv('TWINKLE_CACHE_DIR', str(tmp_path / 'cache'))
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'hf'))
    monkeypatch.setenv('MODELSCOPE_CACHE', str(tmp_path / 'ms'))
    monkeypatch.delenv('TWINKLE_MODEL_ID_ALIASES', raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_model(folder: Path) -> Path:
    """Write the files by which a model's folder is known."""
    folder.mkdir(parents=True)
    for name in ('config.json', 'tokenizer.json', 'model.safetensors'):
        (folder / name).write_text('{}')
    return folder


def make_hf_snapshot(root: Path, name: str) -> Path:
    """Write a model into a Hugging Face cache."""
    repository = root / f'models--{name.replace("/", "--")}'
    (repository / 'refs').mkdir(parents=True)
    (repository / 'refs' / 'main').write_text('c0ffee')
    return make_model(repository / 'snapshots' / 'c0ffee')


@pytest.mark.parametrize('model_id', ['org/name', 'hf://org/name', 'ms://org/name'])
def test_mirror_serves_every_prefix(places: Path, model_id: str) -> None:
    """The mirror has one folder for an id, whichever hub it names."""
    folder = make_model(places / 'mirror/models/org/name')
    assert resolve_model(model_id) == folder


def test_mirror_is_asked_before_the_caches(places: Path) -> None:
    """A mirror exists to overrule what was downloaded before."""
    make_model(places / 'cache/models/org/name')
    make_hf_snapshot(places / 'hf', 'org/name')
    folder = make_model(places / 'mirror/models/org/name')
    assert resolve_model('hf://org/name') == folder


def test_hugging_face_cache_serves_its_own_and_bare_ids(places: Path) -> None:
    """A snapshot of Hugging Face answers hf:// and bare ids."""
    folder = make_hf_snapshot(places / 'hf', 'org/name')
    assert resolve_model('hf://org/name') == resolve_model('org/name') == folder


def test_model_scope_cache_serves_ms_ids(places: Path) -> None:
    """A folder of ModelScope's cache answers ms://."""
    folder = make_model(places / 'ms/models/org/name')
    assert resolve_model('ms://org/name') == folder


def test_alias_comes_first(places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias stands for another id."""
    folder = make_model(places / 'mirror/models/org/name')
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'small=hf://org/name,other=x/y')
    assert resolve_model('small') == folder
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', '{"small": "org/name"}')
    assert resolve_model('small') == folder


def test_malformed_aliases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A variable that cannot be read is an error, not an empty table."""
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'small')
    with pytest.raises(HubError):
        resolve_model('org/name')


def test_local_folder_is_taken_as_it_is(places: Path) -> None:
    """A folder's path is an id, absolute or relative."""
    folder = make_model(places / 'mine')
    assert resolve_model(str(folder)) == folder
    assert resolve_model('./mine').resolve() == folder


def test_local_folder_is_not_taken_where_paths_are_forbidden(places: Path) -> None:
    """A service that serves strangers does not open paths for them."""
    folder = make_model(places / 'mine')
    with pytest.raises(ModelNotFound):
        resolve_model(str(folder), is_local_allowed=False)


def test_folder_without_weights_serves_the_tokenizer_only(places: Path) -> None:
    """A snapshot that holds only the tokenizer is not mistaken for a model."""
    folder = make_model(places / 'mirror/models/org/name')
    (folder / 'model.safetensors').unlink()
    assert resolve_tokenizer('org/name') == folder
    with pytest.raises(ModelNotFound):
        resolve_model(str(folder))


def test_downloads_that_broke_off_are_not_taken_for_whole(places: Path) -> None:
    """A model lacks a file that its index names; of a dataset the client's unfinished file tells."""
    partial, whole = make_hf_snapshot(places / 'hf', 'org/name'), make_model(places / 'ms/models/org/name')
    for index in ('{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}', '{', '[]'):
        (partial / 'model.safetensors.index.json').write_text(index)
        assert resolve_model('org/name') == whole
        with pytest.raises(ModelNotFound):
            resolve_model(str(partial))
    (partial / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert resolve_model('org/name') == partial
    repository = places / 'hf/datasets--org--rows'
    for name, text in {'refs/main': 'c0ffee', 'snapshots/c0ffee/train.jsonl': '{}', 'blobs/a.incomplete': ''}.items():
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    copy = places / 'ms/datasets/org/rows'
    copy.mkdir(parents=True)
    (copy / 'train.jsonl').write_text('{}')
    assert resolve_dataset('org/rows') == copy
    (repository / 'blobs/a.incomplete').unlink()
    assert resolve_dataset('org/rows') == repository / 'snapshots/c0ffee'


def test_dataset_is_found_in_the_mirror_or_at_its_path(places: Path) -> None:
    """Datasets are folders or files."""
    folder = places / 'mirror/datasets/org/rows'
    folder.mkdir(parents=True)
    file = folder / 'train.jsonl'
    file.write_text('{}')
    assert resolve_dataset('ms://org/rows') == folder
    assert resolve_dataset(str(file)) == file
    with pytest.raises(DatasetNotFound):
        resolve_dataset('./absent.jsonl')


def test_unreachable_hub_says_where_to_put_a_copy() -> None:
    """Where nothing has the model, the error names the mirror's folder."""
    with pytest.raises(HubUnreachable, match='models/org/name'):
        resolve_model('ms://org/name')


@pytest.mark.parametrize(
    'model_id',
    ['s3://a/b', '://a/b', 'ms://hf://a/b', '://ms://a/b', 'ms://://a/b', 'a/b/c', 'hf://../b', 'hf://', 'a b'],
)
def test_malformed_ids_are_refused(model_id: str) -> None:
    """What is neither an id nor a path is said to be so."""
    with pytest.raises(ModelNotFound):
        resolve_model(model_id)


def test_id_reads_and_writes_the_same() -> None:
    """`HubId.parse` and `str` are inverses."""
    assert [str(HubId.parse(text)) for text in ('hf://a/b', 'ms://a/b', 'a/b', 'a')] == [
        'hf://a/b',
        'ms://a/b',
        'a/b',
        'a',
    ]


def test_prefix_may_be_there_twice() -> None:
    """`f'ms://{model_id}'` of an id that has its prefix already means that id; two hubs at once mean nothing."""
    assert [str(HubId.parse(text)) for text in ('ms://ms://a/b', 'hf://hf://hf://a/b')] == ['ms://a/b', 'hf://a/b']


def test_unknown_built_in_model_is_refused() -> None:
    """`get_model` serves its own names only."""
    with pytest.raises(ModelNotFound):
        get_model('org/name')
