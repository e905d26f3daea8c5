"""A service reads private datasets and tokenizers of Hugging Face only if its operator allows it.

The hub is a server on a loopback socket. Each program is a process, because the client reads its settings once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.fake_hub import running_hub

PROGRAM = """
import json, sys
from twinkle.hub import HubError, resolve_dataset, resolve_tokenizer
name = sys.argv[1]
resolve = resolve_tokenizer if name == 'tokenizer.json' else resolve_dataset
found = []
for options in json.loads(sys.argv[2]):
    try:
        folder = resolve('hf://org/rows', **options)
        found.append((folder / name).read_text())
    except HubError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
CONTENT = '{"x": 1}\n'


def resolved(file_name: str, permissions: list[bool], home: Path, url: str, **options: bool) -> list[str]:
    """Return the file of a repository, or the name of the error, for each permission."""
    calls = [{'is_private_allowed': is_allowed, **options} for is_allowed in permissions]
    settings = {'HF_ENDPOINT': url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(home), 'TWINKLE_HUB_DIR': ''}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, file_name, json.dumps(calls)],
        env={**os.environ, **settings},
        check=True,
        timeout=240,
        capture_output=True,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize(
    ('file_name', 'missing'), [('train.jsonl', 'DatasetNotFound'), ('tokenizer.json', 'ModelNotFound')]
)
def test_private_repositories_need_a_permission(tmp_path: Path, file_name: str, missing: str) -> None:
    """The token is not sent and the cache is not used without a permission; public repositories need none."""
    with running_hub() as hub:
        hub.files['org/rows'], hub.is_private['org/rows'] = {file_name: CONTENT.encode()}, True
        found = resolved(file_name, [False, True, False], tmp_path, hub.url)
        assert found == [missing, CONTENT, missing]
        hub.is_private['org/rows'] = False
        assert resolved(file_name, [False], tmp_path / 'other', hub.url) == [CONTENT]


@pytest.mark.parametrize(
    ('file_name', 'missing'), [('train.jsonl', 'DatasetNotFound'), ('tokenizer.json', 'ModelNotFound')]
)
def test_gated_repositories_in_the_cache_need_a_permission(tmp_path: Path, file_name: str, missing: str) -> None:
    """Everyone can read the commit of a gated repository, but a copy in the cache is not used without a permission."""
    with running_hub(gated={'org/rows'}) as hub:
        hub.files['org/rows'], hub.is_private['org/rows'] = {file_name: CONTENT.encode()}, False
        assert resolved(file_name, [True, False], tmp_path, hub.url) == [CONTENT, missing]


@pytest.mark.parametrize('file_name', ['train.jsonl', 'tokenizer.json'])
def test_token_is_not_used_for_a_repository_that_moved(tmp_path: Path, file_name: str) -> None:
    """A service refuses a private or gated repository that has another name now, and reads a public one anonymously."""
    with running_hub(moved={'org/rows': 'other/place'}) as hub:
        hub.files['other/place'], hub.is_private['other/place'] = {file_name: CONTENT.encode()}, True
        assert resolved(file_name, [True], tmp_path, hub.url, is_move_allowed=False) == ['RepositoryMoved']
        hub.is_private['other/place'], hub.gated = False, {'other/place'}
        assert resolved(file_name, [True], tmp_path, hub.url, is_move_allowed=False) == ['RepositoryMoved']
        hub.gated = set()
        assert resolved(file_name, [True], tmp_path, hub.url, is_move_allowed=False) == [CONTENT]
        assert hub.authorized == []
        hub.is_private['other/place'] = True
        assert resolved(file_name, [True], tmp_path / 'other', hub.url) == [CONTENT]
        assert hub.authorized
