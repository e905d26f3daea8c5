"""Ids are resolved to folders: the order of locations, and the errors if no location has the files."""

import socket
from pathlib import Path

import pytest

from twinkle.hub import (
    BUILT_IN_MODELS,
    DatasetNotFound,
    HubError,
    HubId,
    HubUnreachable,
    ModelNotFound,
    get_model,
    public_name,
    repository_name,
    resolve_dataset,
    resolve_model,
    resolve_tokenizer,
)


@pytest.fixture(autouse=True)
def root(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory with an empty mirror and empty caches."""
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path / 'mirror'))
    monkeypatch.setenv('TWINKLE_CACHE_DIR', str(tmp_path / 'cache'))
    monkeypatch.setenv('HF_HUB_CACHE', str(tmp_path / 'hf'))
    monkeypatch.setenv('MODELSCOPE_CACHE', str(tmp_path / 'ms'))
    monkeypatch.delenv('TWINKLE_MODEL_ID_ALIASES', raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def make_model(folder: Path) -> Path:
    """Write the files of a model folder, and return the folder."""
    folder.mkdir(parents=True)
    for name in ('config.json', 'tokenizer.json', 'model.safetensors'):
        (folder / name).write_text('{}')
    return folder


def make_hf_snapshot(root: Path, name: str) -> Path:
    """Write a model to a Hugging Face cache, and return its folder."""
    repository = root / f'models--{name.replace("/", "--")}'
    (repository / 'refs').mkdir(parents=True)
    (repository / 'refs' / 'main').write_text('c0ffee')
    return make_model(repository / 'snapshots' / 'c0ffee')


@pytest.mark.parametrize('model_id', ['org/name', 'hf://org/name', 'ms://org/name'])
def test_mirror_serves_every_prefix(root: Path, model_id: str) -> None:
    """The mirror has one folder per id, regardless of the prefix."""
    folder = make_model(root / 'mirror/models/org/name')
    assert resolve_model(model_id) == folder


def test_mirror_has_precedence_over_the_caches(root: Path) -> None:
    """A model in the mirror has precedence over downloaded ones."""
    make_model(root / 'cache/models/org/name')
    make_hf_snapshot(root / 'hf', 'org/name')
    folder = make_model(root / 'mirror/models/org/name')
    assert resolve_model('hf://org/name') == folder


def test_hugging_face_cache_serves_its_own_and_bare_ids(root: Path) -> None:
    """A snapshot in the Hugging Face cache is found by hf:// ids and bare ids."""
    folder = make_hf_snapshot(root / 'hf', 'org/name')
    assert resolve_model('hf://org/name') == resolve_model('org/name') == folder


def test_model_scope_cache_serves_ms_ids(root: Path) -> None:
    """A folder in the ModelScope cache is found by ms:// ids."""
    folder = make_model(root / 'ms/models/org/name')
    assert resolve_model('ms://org/name') == folder


def test_aliases_are_replaced(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An alias is replaced by its id before anything else is searched."""
    folder = make_model(root / 'mirror/models/org/name')
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'small=hf://org/name,other=x/y')
    assert resolve_model('small') == folder
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', '{"small": "org/name"}')
    assert resolve_model('small') == folder


def test_built_in_model_has_a_hub_id_and_an_alias(root: Path) -> None:
    """The hub id and the alias select the converted model; the id with `hf://` selects the cached repository."""
    converted = make_model(root / 'cache/models/twinkle/smollm2-135m-instruct')
    (hub_id,) = BUILT_IN_MODELS
    of_hub = make_hf_snapshot(root / 'hf', hub_id)
    for name in (hub_id, 'smollm2-135m-instruct'):
        assert resolve_model(name) == resolve_tokenizer(name) == get_model(name) == converted
    assert resolve_model(f'hf://{hub_id}') == of_hub


def test_malformed_aliases_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A malformed value of `TWINKLE_MODEL_ID_ALIASES` raises HubError."""
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'small')
    with pytest.raises(HubError):
        resolve_model('org/name')


def test_local_folder_is_used(root: Path) -> None:
    """The absolute or relative path of a folder is a valid id."""
    folder = make_model(root / 'mine')
    assert resolve_model(str(folder)) == folder
    assert resolve_model('./mine').resolve() == folder


def test_paths_can_be_forbidden(root: Path) -> None:
    """A path is refused with `is_local_allowed=False`."""
    folder = make_model(root / 'mine')
    with pytest.raises(ModelNotFound):
        resolve_model(str(folder), is_local_allowed=False)


def test_folder_without_weights_serves_the_tokenizer_only(root: Path) -> None:
    """A folder without weights is used for the tokenizer but not for the model."""
    folder = make_model(root / 'mirror/models/org/name')
    (folder / 'model.safetensors').unlink()
    assert resolve_tokenizer('org/name') == folder
    with pytest.raises(ModelNotFound):
        resolve_model(str(folder))


def test_incomplete_downloads_are_skipped(root: Path) -> None:
    """A model that lacks a file of its index and a dataset with an unfinished file are skipped."""
    partial, whole = make_hf_snapshot(root / 'hf', 'org/name'), make_model(root / 'ms/models/org/name')
    for index in ('{"weight_map": {"a": "model.safetensors", "b": "more.safetensors"}}', '{', '[]'):
        (partial / 'model.safetensors.index.json').write_text(index)
        assert resolve_model('org/name') == whole
        with pytest.raises(ModelNotFound):
            resolve_model(str(partial))
    (partial / 'model.safetensors.index.json').write_text('{"weight_map": {"a": "model.safetensors"}}')
    assert resolve_model('org/name') == partial
    repository = root / 'hf/datasets--org--rows'
    for name, text in {'refs/main': 'c0ffee', 'snapshots/c0ffee/train.jsonl': '{}', 'blobs/a.incomplete': ''}.items():
        (repository / name).parent.mkdir(parents=True)
        (repository / name).write_text(text)
    copy = root / 'ms/datasets/org/rows'
    copy.mkdir(parents=True)
    (copy / 'train.jsonl').write_text('{}')
    assert resolve_dataset('org/rows') == copy
    (repository / 'blobs/a.incomplete').unlink()
    assert resolve_dataset('org/rows') == repository / 'snapshots/c0ffee'


def test_dataset_is_found_in_the_mirror_or_at_its_path(root: Path) -> None:
    """A dataset is found in the mirror by its id, or at a path; an absent path raises DatasetNotFound."""
    folder = root / 'mirror/datasets/org/rows'
    folder.mkdir(parents=True)
    file = folder / 'train.jsonl'
    file.write_text('{}')
    assert resolve_dataset('ms://org/rows') == folder
    assert resolve_dataset(str(file)) == file
    with pytest.raises(DatasetNotFound):
        resolve_dataset('./absent.jsonl')


@pytest.mark.slow
def test_error_of_an_unreachable_hub_names_the_mirror_folder() -> None:
    """The error for a model that is not available locally names the folder in the mirror."""
    with pytest.raises(HubUnreachable, match='models/org/name'):
        resolve_model('ms://org/name')


def test_a_limited_download_from_a_stopped_hub_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request for the sizes of the files raises HubUnreachable if the hub's port is closed."""
    with socket.socket() as closed:
        closed.bind(('127.0.0.1', 0))
        monkeypatch.setenv('HF_ENDPOINT', f'http://127.0.0.1:{closed.getsockname()[1]}')
        with pytest.raises(HubUnreachable, match='datasets/org/rows'):
            resolve_dataset('hf://org/rows', download_limit_bytes=100)


@pytest.mark.parametrize(
    'model_id',
    [
        *('s3://a/b', '://a/b', 'ms://hf://a/b', '://ms://a/b', 'ms://://a/b', 'a/b/c', 'hf://../b', 'hf://', 'a b'),
        *('~no-such-user/model', f'a/{"b/" * 4000}', f'/{"b" * 4000}', f'./{"b" * 4000}', f'~/{"b" * 4000}'),
    ],
    ids=lambda model_id: model_id[:20],
)
def test_malformed_ids_are_refused(model_id: str) -> None:
    """A string that is neither an id nor a path is refused."""
    with pytest.raises(ModelNotFound):
        resolve_model(model_id)


def test_parsing_and_formatting_are_inverse() -> None:
    """`HubId.parse` and `str` are inverse functions."""
    assert [str(HubId.parse(text)) for text in ('hf://a/b', 'ms://a/b', 'a/b', 'a')] == [
        'hf://a/b',
        'ms://a/b',
        'a/b',
        'a',
    ]


def test_a_repeated_prefix_is_accepted() -> None:
    """An id with a repeated prefix, for example from `f'ms://{model_id}'`, is the same as with one prefix."""
    assert [str(HubId.parse(text)) for text in ('ms://ms://a/b', 'hf://hf://hf://a/b')] == ['ms://a/b', 'hf://a/b']


def test_unknown_built_in_model_is_refused() -> None:
    """`get_model` accepts only the names of built-in models."""
    with pytest.raises(ModelNotFound):
        get_model('org/name')


def test_repository_of_a_folder_is_known_from_aliases_mirror_and_caches(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder has a repository's name if it is an alias's target, or in the mirror or a cache; files do not count."""
    folder = make_model(root / 'srv' / 'tiny')
    (folder / 'config.json').write_text('{"_name_or_path": "org/original"}')
    assert (repository_name(str(folder)), public_name(str(folder))) == (None, 'tiny')
    named = {
        root / 'mirror' / 'models' / 'org' / 'name': 'org/name',
        root / 'cache' / 'models' / 'org' / 'name': 'org/name',
        root / 'cache' / 'models' / 'twinkle' / 'smollm2-135m-instruct': 'HuggingFaceTB/SmolLM2-135M-Instruct',
        make_hf_snapshot(root / 'hf', 'org/name'): 'org/name',
    }
    assert {path: repository_name(str(path)) for path in named} == named
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', f'org/tiny={folder}')
    assert public_name(str(folder)) == 'org/tiny'
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'malformed')
    assert public_name(str(folder)) == 'tiny'
