"""A dataset on a hub cannot make the process that reads it open other files, or connect to other hosts."""

import io
import json
import os
import tarfile
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from fixtures.fake_hub import FakeHub, running_hub
from twinkle.dataset import DatasetError
from twinkle.hub import HubError
from twinkle_services.data.backends.hub_rows import HubAccess, RowProcess
from twinkle_services.data.domain import HubSource, Row

pytestmark = pytest.mark.timeout(300)  # each reading starts a process, which imports libraries

NAME = 'org/chats'
LINES = b'{"x": 1}\n{"x": 2}\n'
RECORDER = Path(__file__).parents[2] / 'fixtures' / 'file_recorder'
Files = dict[str, bytes]


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The log of the files that processes of this test use."""
    path = tmp_path / 'log'
    monkeypatch.setenv('TWINKLE_FILE_LOG', str(path))
    monkeypatch.setenv('PYTHONPATH', os.pathsep.join([str(RECORDER), os.environ.get('PYTHONPATH', '')]))
    return path


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    """A folder of the machine with rows, an archive with rows, an image, and an empty folder."""
    folder = tmp_path / 'secret'
    (folder / 'empty').mkdir(parents=True)
    (folder / 'rows.jsonl').write_bytes(LINES)
    (folder / 'rows.zip').write_bytes(zipped({'x.jsonl': LINES}))
    (folder / 'image.jpg').write_bytes(b'')
    return folder


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub that the processes of this test use, with a token of the operator."""
    with running_hub() as running:
        settings = {'HF_ENDPOINT': running.url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(tmp_path / 'hf')}
        for name, value in {**settings, 'TWINKLE_HUB_DIR': ''}.items():
            monkeypatch.setenv(name, value)
        yield running


def zipped(files: Files) -> bytes:
    """Return an archive of files with any names."""
    content = io.BytesIO()
    with zipfile.ZipFile(content, 'w') as archive:
        for name, data in files.items():
            archive.writestr(name, data)
    return content.getvalue()


def tar_of(*names: str) -> bytes:
    """Return an archive of empty files."""
    content = io.BytesIO()
    with tarfile.open(fileobj=content, mode='w') as archive:
        for name in names:
            archive.addfile(tarfile.TarInfo(name))
    return content.getvalue()


def readme(**config: Any) -> Files:
    """Return a repository with rows and a README with one config."""
    front = json.dumps({'configs': [{'config_name': 'default', **config}]})
    return {'train.jsonl': LINES, 'README.md': f'---\n{front}\n---\n'.encode()}


def read(hub: FakeHub, files: Files, *token_repositories: str, is_private: bool = False) -> list[Row]:
    """Return the rows of a repository as the service reads them."""
    hub.commits += 1
    hub.files[NAME], hub.is_private[NAME] = files, is_private
    access = HubAccess(token_repositories=frozenset(token_repositories))
    process = RowProcess(HubSource(dataset_id=f'hf://{NAME}'), revision='', access=access, memory_bytes=1 << 30)
    try:
        process.found()
        return [*process.rows()]
    finally:
        process.close()


ATTACKS: dict[str, Callable[[str, str], Files]] = {
    'absolute path': lambda secret, _: readme(data_files=f'{secret}/rows.jsonl'),
    'other host': lambda _, host: readme(data_files=[{'split': 'train', 'path': f'{host}/rows.jsonl'}]),
    'second description': lambda secret, _: {
        'train.jsonl': LINES,
        '.huggingface.yaml': f'configs: [{{config_name: default, data_files: "{secret}/*"}}]'.encode(),
    },
    'folder of the cache': lambda secret, _: readme(data_files='*.jsonl', version=f'{secret}/empty'),
    'name in a zip archive': lambda secret, _: {'train.zip': zipped({f'x.jsonl::{secret}/rows.zip': b''})},
    'name in a tar archive': lambda secret, _: {'train.tar': tar_of(f'{secret}/image.jpg', f'{secret}/image.txt')},
}


@pytest.mark.parametrize('name', [*ATTACKS])
def test_other_files_and_hosts_are_not_used(hub: FakeHub, log: Path, secret: Path, name: str) -> None:
    """The dataset is refused, no file of the machine is opened or looked up, and only the hub is connected to."""
    with running_hub() as other:
        with pytest.raises(DatasetError, match=NAME):
            read(hub, ATTACKS[name](str(secret), other.url))
        assert not other.asked.is_set()
        assert other.reads == []
    lines = log.read_text().splitlines()
    assert [line for line in lines if str(secret) in line] == []
    ports = {line.rpartition(',')[2].strip(' )') for line in lines if line.startswith("'socket.connect'")}
    assert ports == {hub.url.rpartition(':')[2]}
    assert (secret / 'empty').is_dir()


def test_descriptions_without_effect_on_files_are_accepted(hub: FakeHub, log: Path, secret: Path) -> None:
    """The older `dataset_infos.json` may contain any names, and is not used to find files."""
    info = {
        'dataset_name': str(secret),
        'builder_name': str(secret),
        'download_checksums': {f'{secret}/rows.jsonl': {}},
    }
    files = {'train.jsonl': LINES, 'dataset_infos.json': json.dumps({'default': info}).encode()}
    assert read(hub, files) == [{'x': 1}, {'x': 2}]
    text = log.read_text()
    assert str(secret) not in text
    assert 'dataset_infos.json' in text


def test_archives_and_patterns_of_a_repository_are_read(hub: FakeHub) -> None:
    """Archives, compressed files and relative patterns inside of the repository stay readable."""
    assert read(hub, {'train.zip': zipped({'a/x.jsonl': LINES})}) == [{'x': 1}, {'x': 2}]
    assert read(hub, {**readme(data_files='data/*.txt'), 'data/train.txt': b'one\n'}) == [{'text': 'one'}]


def test_private_datasets_need_a_permission(hub: FakeHub) -> None:
    """The token of the operator reads a private dataset only if its name or its owner is listed."""
    files = {'train.jsonl': LINES}
    for allowed in ((), ('org/other', 'other')):
        with pytest.raises(HubError):
            read(hub, files, *allowed, is_private=True)
        assert 'train.jsonl' not in hub.reads
    for allowed in (NAME, 'org', '*'):
        assert read(hub, files, allowed, is_private=True) == [{'x': 1}, {'x': 2}]
    # The permission ends although the hub's client has cached the description of the repository.
    with pytest.raises(HubError):
        read(hub, readme(data_files='*.jsonl'), is_private=True)
