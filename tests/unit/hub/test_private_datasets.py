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
name, permissions = sys.argv[1], json.loads(sys.argv[2])
resolve = resolve_tokenizer if name == 'tokenizer.json' else resolve_dataset
found = []
for is_allowed in permissions:
    try:
        folder = resolve('hf://org/rows', is_private_allowed=is_allowed)
        found.append((folder / name).read_text())
    except HubError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
CONTENT = '{"x": 1}\n'


def resolved(file_name: str, permissions: list[bool], home: Path, url: str) -> list[str]:
    """Return the file of a repository, or the name of the error, for each permission."""
    settings = {'HF_ENDPOINT': url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(home), 'TWINKLE_HUB_DIR': ''}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, file_name, json.dumps(permissions)],
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
