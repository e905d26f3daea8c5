"""Uploads to and downloads from a fake ModelScope, with ModelScope's client over a loopback socket."""

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import wait
from pathlib import Path

import pytest

from fixtures.fake_model_scope import FakeModelScope, running_model_scope
from twinkle.hub import (
    DatasetNotFound,
    DownloadTooLarge,
    HFHub,
    HubError,
    HubOperation,
    ModelNotFound,
    MSHub,
    UploadRefused,
    resolve_dataset,
    resolve_model,
    resolve_plugin,
    resolve_tokenizer,
    upload,
)

FILES = {'config.json': b'{}', 'tokenizer.json': b'{"a": 1}', 'model.safetensors': b'weights' * 99}
TOKEN = 'ms_right'


@pytest.fixture(autouse=True)
def hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeModelScope]:
    """A running hub, with empty caches and without a mirror; the client does not access the user's files."""
    for name in ('TWINKLE_HUB_DIR', 'MODELSCOPE_API_TOKEN', 'TWINKLE_MODEL_ID_ALIASES'):
        monkeypatch.delenv(name, raising=False)
    for name in ('TWINKLE_CACHE_DIR', 'MODELSCOPE_CACHE', 'MODELSCOPE_HOME', 'HF_HOME', 'HOME'):
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    with running_model_scope() as running:
        monkeypatch.setenv('MODELSCOPE_ENDPOINT', running.url)
        yield running


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model folder with additional files that are not uploaded."""
    folder = tmp_path / 'model'
    (folder / 'deeper').mkdir(parents=True)
    for name, data in {**FILES, 'code.py': b'pass', 'deeper/config.json': b'deep'}.items():
        (folder / name).write_bytes(data)
    return folder


def contents(folder: Path) -> dict[str, bytes]:
    """Return the files in a folder by their relative paths."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob('*') if path.is_file()}


def test_uploaded_files_are_downloaded_unchanged(hub: FakeModelScope, folder: Path) -> None:
    """A folder is uploaded as one commit of a private repository, and a second download sends no request."""
    uploaded = upload(folder, 'ms://org/name', token=TOKEN)
    assert hub.files == {'org/name': FILES}
    assert (uploaded.url, uploaded.commit, hub.commits) == (f'{hub.url}/models/org/name', f'{1:040x}', 1)
    assert hub.is_private == {'org/name': True}
    hub.is_private['org/name'] = False
    found = resolve_model('ms://org/name')
    assert contents(found) == FILES
    hub.requests.clear()
    assert resolve_model('ms://org/name') == found
    assert hub.requests == []


def test_a_second_upload_replaces_files_of_the_same_name(hub: FakeModelScope, folder: Path) -> None:
    """Files with other names are kept, and weights that exist on the hub are not sent again."""
    upload(folder, 'ms://org/name', token=TOKEN, is_private=False)
    (folder / 'config.json').write_bytes(b'{"new": 1}')
    (folder / 'tokenizer.json').unlink()
    hub.requests.clear()
    upload(folder, 'ms://org/name', token=TOKEN)
    assert hub.files['org/name'] == {**FILES, 'config.json': b'{"new": 1}'}
    assert (hub.commits, hub.is_private) == (2, {'org/name': False})
    assert not [request for request in hub.requests if request.startswith('PUT')]


@pytest.mark.parametrize(('target', 'token'), [('ms://org/name', 'ms_wrong'), ('ms://other/name', TOKEN)])
def test_refused_uploads_leave_no_files(hub: FakeModelScope, folder: Path, target: str, token: str) -> None:
    """A wrong token and a foreign owner are refused, and no file is uploaded."""
    with pytest.raises(UploadRefused):
        upload(folder, target, token=token)
    assert not any(hub.files.values())


def test_only_the_required_files_are_downloaded(hub: FakeModelScope) -> None:
    """A tokenizer is downloaded without weights, a dataset completely, and a plugin without other files."""
    hub.files['org/name'] = dict(FILES)
    hub.files['datasets/org/rows'] = {'train.jsonl': b'{"x": 1}\n', 'more/notes.md': b'notes'}
    hub.files['org/plugin'] = {'__init__.py': b'', 'notes.pdf': b''}
    tokenizer = resolve_tokenizer('ms://org/name')
    assert sorted(contents(tokenizer)) == ['config.json', 'tokenizer.json']
    assert contents(resolve_model('ms://org/name')) == FILES
    hub.requests.clear()
    with pytest.raises(DownloadTooLarge) as refused:
        resolve_dataset('ms://org/rows', download_limit_bytes=13)
    assert (refused.value.size_bytes, refused.value.limit_bytes) == (14, 13)
    assert not any(request.endswith('/repo') for request in hub.requests)
    found = resolve_dataset('ms://org/rows', download_limit_bytes=14)
    assert contents(found) == hub.files['datasets/org/rows']
    assert contents(resolve_dataset('ms://org/rows')) == hub.files['datasets/org/rows']
    assert sorted(contents(resolve_plugin('ms://org/plugin'))) == ['__init__.py']


def test_missing_repositories_are_not_found(hub: FakeModelScope) -> None:
    """A missing model and a missing dataset raise different errors."""
    with pytest.raises(ModelNotFound):
        resolve_model('ms://org/none')
    with pytest.raises(DatasetNotFound):
        resolve_dataset('ms://org/none')
    assert hub.commits == 0


def test_private_datasets_need_a_permission(hub: FakeModelScope, monkeypatch: pytest.MonkeyPatch) -> None:
    """The token is not sent and earlier downloads are not used without a permission; public datasets need none."""
    name, files = 'datasets/org/rows', {'train.jsonl': b'{"x": 1}\n'}
    hub.files[name], hub.is_private[name] = files, True
    monkeypatch.setenv('MODELSCOPE_API_TOKEN', TOKEN)
    private = resolve_dataset('ms://org/rows')
    with pytest.raises(DatasetNotFound):
        resolve_dataset('ms://org/rows', is_private_allowed=False)
    hub.is_private[name] = False
    public = resolve_dataset('ms://org/rows', is_private_allowed=False)
    assert public != private
    assert contents(public) == contents(private) == files


def test_background_pushes_are_awaited_together(hub: FakeModelScope, folder: Path) -> None:
    """`wait_for` raises a failure once all pushes are done; its next call returns only results of later pushes."""
    pushes = [
        MSHub.async_push_to_hub('org/one', folder, token=TOKEN),
        HubOperation.async_push_to_hub('ms://other/two', folder, token=TOKEN),
        MSHub.async_push_to_hub('ms://org/three', folder, token=TOKEN, ignore_patterns=['model.*']),
    ]
    with pytest.raises(UploadRefused):
        HubOperation.wait_for()
    assert not wait(pushes, 0).not_done
    assert sorted(hub.files['org/three']) == ['config.json', 'tokenizer.json']
    assert HubOperation.wait_for() == []
    MSHub.async_push_to_hub('org/one', folder, token=TOKEN)
    assert [done.url for done in HFHub.wait_for()] == [f'{hub.url}/models/org/one']
    with pytest.raises(HubError):
        MSHub.async_push_to_hub('hf://org/one', folder, token=TOKEN)
    with pytest.raises(HubError):
        HubOperation.push_to_hub('org/one', folder, token=TOKEN)


def test_hub_methods_accept_ids_with_and_without_prefix(
    hub: FakeModelScope, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The methods of a hub accept ids with and without its prefix, aliases and folders."""
    assert MSHub.push_to_hub('org/name', folder, token=TOKEN, private=False).url.endswith('/models/org/name')
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'mine=ms://org/name')
    model_folders = [MSHub.download_model(text) for text in ('org/name', 'ms://org/name', 'mine', str(folder))]
    assert [contents(Path(folder_name)).keys() >= FILES.keys() for folder_name in model_folders] == [True] * 4
    assert model_folders[0] == model_folders[1] == model_folders[2]
    assert sorted(contents(Path(MSHub.download_file('org/name', 'config.*')))) == ['config.json']
    with pytest.raises(HubError):
        MSHub.download_file('org/name', ['*.bin'])
    hub.files['datasets/org/rows'] = {'train.jsonl': b'{"x": 1}\n{"x": 2}\n'}
    assert list(MSHub.load_dataset('org/rows')['x']) == [1, 2]
    with pytest.raises(DatasetNotFound):
        MSHub.load_dataset('org/rows', split='test')
    with pytest.raises(HubError):
        HFHub.download_model('ms://org/name')


def test_repository_ids_are_unambiguous(
    hub: FakeModelScope, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A local folder does not change the target of a push, and similar names have separate caches."""
    (tmp_path / 'org' / 'one').mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert MSHub.push_to_hub('org/one', folder, token=TOKEN).url.endswith('/models/org/one')
    hub.files['org/b--c'] = {**FILES, 'tokenizer.json': b'{"of": "org"}'}
    hub.files['org--b/c'] = {**FILES, 'tokenizer.json': b'{"of": "org--b"}'}
    texts = [(resolve_tokenizer(f'ms://{name}') / 'tokenizer.json').read_text() for name in ('org/b--c', 'org--b/c')]
    assert texts == ['{"of": "org"}', '{"of": "org--b"}']


def test_files_are_found_in_the_mirror_and_by_alias(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`download_file` finds files in the mirror, including by alias, and raises HubError for a missing file."""
    mirrored = tmp_path / 'mirror/models/org/name'
    mirrored.mkdir(parents=True)
    (mirrored / 'config.json').write_text('{}')
    monkeypatch.setenv('TWINKLE_HUB_DIR', str(tmp_path / 'mirror'))
    monkeypatch.setenv('TWINKLE_MODEL_ID_ALIASES', 'mine=ms://org/name')
    for name in ('ms://org/name', 'mine'):
        assert HubOperation.download_file(name, '*.json') == str(mirrored)
    with pytest.raises(HubError):
        HubOperation.download_file('mine', '*.bin')


WITHOUT_CLIENT = """
import sys
sys.modules['modelscope_hub'] = None  # makes the import fail
from twinkle.hub import HubUnreachable, resolve_model, upload
for act in (lambda: upload(sys.argv[1], 'ms://org/name', token='any'), lambda: resolve_model('ms://org/name')):
    try:
        act()
    except HubUnreachable as error:
        assert 'modelscope' in str(error)
    else:
        raise AssertionError
"""


def test_a_missing_client_is_reported(folder: Path) -> None:
    """The errors of uploads and downloads without the client name the extra to install."""
    subprocess.run([sys.executable, '-c', WITHOUT_CLIENT, str(folder)], check=True, timeout=60)
