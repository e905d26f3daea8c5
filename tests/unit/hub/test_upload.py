"""Uploads to a fake Hugging Face hub, with Hugging Face's client over a loopback socket."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.fake_hub import running_hub
from twinkle.hub import HubError, HubUnreachable, UploadRefused, signed_card, upload, upload_later

FILES = {
    'config.json': b'{}',
    'tokenizer.json': b'{"a": 1}',
    'README.md': b'hello',
    'twinkle_merge.json': b'{}',
    'adapter_model.bin': b'pickle',
    'modeling.py': b'code',
    '.hidden.json': b'{}',
}
TOKEN = 'hf_right'


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with files of every kind and a link to a file outside it."""
    (tmp_path / 'secret.json').write_bytes(b'secret')
    folder = tmp_path / 'model'
    (folder / 'deeper').mkdir(parents=True)
    (folder / 'deeper' / 'config.json').write_bytes(b'deep')
    for name, data in FILES.items():
        (folder / name).write_bytes(data)
    (folder / 'link.json').symlink_to(tmp_path / 'secret.json')
    return folder


def test_files_are_uploaded_unchanged(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Configuration and text files are uploaded, but no pickles, code, links or ignored files."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        uploaded = upload(folder, 'hf://org/name', token=TOKEN, ignore=('twinkle_*', '.*'))
        assert hub.files == {'org/name': {name: FILES[name] for name in ('config.json', 'tokenizer.json', 'README.md')}}
        assert (uploaded.url, uploaded.commit) == (f'{hub.url}/org/name', f'{1:040x}')
        assert hub.is_private == {'org/name': True}


def test_a_second_upload_replaces_files_of_the_same_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A second upload replaces files of the same name and keeps other files."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        upload(folder, 'hf://org/name', token=TOKEN, is_private=False)
        (folder / 'config.json').write_bytes(b'{"new": 1}')
        (folder / 'README.md').unlink()
        upload(folder, 'hf://org/name', token=TOKEN)
        assert hub.files['org/name']['config.json'] == b'{"new": 1}'
        assert hub.files['org/name']['README.md'] == b'hello'
        assert hub.is_private == {'org/name': False}


def test_a_generated_card_replaces_only_generated_cards(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A generated card replaces one of an earlier upload, but not an edited one; a card of the user replaces both."""
    first, second = signed_card('# one\n'), signed_card('# two\n')
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        found: list[bytes] = []
        for card, edited in ((first, None), (second, None), (first, b'# mine\n'), (b'# better\n', None)):
            if edited is not None:
                hub.files['org/name']['README.md'] = edited
            (folder / 'README.md').write_bytes(card)
            upload(folder, 'hf://org/name', token=TOKEN)
            found.append(hub.files['org/name']['README.md'])
        assert found == [first, second, b'# mine\n', b'# better\n']


def test_weights_are_uploaded_as_large_files(folder: Path) -> None:
    """Weights are sent with git-lfs; a separate process is used because the client reads its settings on import."""
    weights = os.urandom(100_000)
    (folder / 'model.safetensors').write_bytes(weights)
    code = 'import sys; from twinkle.hub import upload; upload(sys.argv[1], "hf://org/name", token=sys.argv[2])'
    with running_hub() as hub:
        environment = {**os.environ, 'HF_ENDPOINT': hub.url, 'HF_HUB_DISABLE_XET': '1'}
        subprocess.run([sys.executable, '-c', code, str(folder), TOKEN], env=environment, check=True, timeout=60)
        assert hub.files['org/name']['model.safetensors'] == weights
        assert len(hub.objects) == 1


def test_dataset_that_is_too_large_is_not_downloaded(tmp_path: Path) -> None:
    """A dataset whose files together exceed the limit is refused with the sum of their sizes."""
    code = (
        'from twinkle.hub import DownloadTooLarge, resolve_dataset\n'
        'try:\n    resolve_dataset("hf://org/rows", download_limit_bytes=299)\n'
        'except DownloadTooLarge as error:\n    print(error.size_bytes, error.limit_bytes)'
    )
    with running_hub() as hub:
        hub.files['org/rows'], hub.is_private['org/rows'] = {'a.jsonl': bytes(100), 'b/c.parquet': bytes(200)}, False
        settings = {'HF_ENDPOINT': hub.url, 'HF_TOKEN': TOKEN, 'HF_HOME': str(tmp_path), 'TWINKLE_HUB_DIR': ''}
        done = subprocess.run(
            [sys.executable, '-c', code], env={**os.environ, **settings}, check=True, timeout=60, capture_output=True
        )
    assert done.stdout.split() == [b'300', b'299']


@pytest.mark.parametrize(
    ('hub_id', 'token'),
    [
        ('hf://org/name', 'hf_wrong'),
        ('hf://stranger/name', TOKEN),
        ('hf://org/two--dashes', TOKEN),
        ('hf://org/name.git', TOKEN),
        ('hf://org/name', 'hf_\u20ac'),
        ('hf://org/name', 'hf_right\n'),
    ],
)
def test_permanent_failures_are_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, hub_id: str, token: str) -> None:
    """Invalid tokens, foreign owners and invalid names are refused, and the error does not contain the token."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        with pytest.raises(UploadRefused) as refusal:
            upload(folder, hub_id, token=token)
        assert token not in str(refusal.value) + str(refusal.value.__cause__)
        assert not hub.files


@pytest.mark.parametrize('broken', ['create', 'commit'])
def test_a_failed_upload_can_be_retried(folder: Path, monkeypatch: pytest.MonkeyPatch, broken: str) -> None:
    """An upload that failed in either request succeeds when it is retried."""
    with running_hub(broken=broken) as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        with pytest.raises(HubUnreachable):
            upload(folder, 'hf://org/name', token=TOKEN)
        hub.broken = ''
        upload(folder, 'hf://org/name', token=TOKEN)
        assert hub.commits == 1


def test_a_stopped_hub_is_unreachable(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A hub whose port is closed raises HubUnreachable."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
    with pytest.raises(HubUnreachable):
        upload(folder, 'hf://org/name', token=TOKEN)


@pytest.mark.parametrize('hub_id', ['org/name', 'hf://name', 'hf://../x', 's3://org/name', ''])
def test_ids_that_name_no_repository_are_refused(folder: Path, hub_id: str) -> None:
    """An id without a hub or without an owner is refused."""
    with pytest.raises(HubError):
        upload(folder, hub_id, token=TOKEN)


def test_invalid_arguments_are_refused_before_any_request(folder: Path, tmp_path: Path) -> None:
    """An empty token, a missing folder and a folder without files are refused."""
    for path, token in ((folder, ''), (tmp_path / 'none', TOKEN), (folder / 'deeper', TOKEN)):
        with pytest.raises(HubError):
            upload(path, 'hf://org/name', token=token, ignore=('config.json',))


def test_a_background_upload_is_validated_immediately(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Invalid arguments are refused before a thread starts; the future contains the hub's response."""
    with running_hub() as hub:
        monkeypatch.setenv('HF_ENDPOINT', hub.url)
        with pytest.raises(HubError):
            upload_later(folder, 'hf://org/name', token='')
        assert upload_later(folder, 'hf://org/name', token=TOKEN).result().url == f'{hub.url}/org/name'
        refused = upload_later(folder, 'hf://org/name', token='hf_wrong')
        with pytest.raises(UploadRefused):
            refused.result()
