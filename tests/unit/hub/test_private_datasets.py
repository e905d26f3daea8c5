"""A service reads private datasets of Hugging Face only if its operator allows it.

The hub is a server on a loopback socket. Each program is a process, because the client reads its settings once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path

from fixtures.fake_hub import running_hub

PROGRAM = """
import json, sys
from twinkle.hub import HubError, resolve_dataset
found = []
for is_allowed in json.loads(sys.argv[1]):
    try:
        folder = resolve_dataset('hf://org/rows', is_private_allowed=is_allowed, download_limit_bytes=100)
        found.append((folder / 'train.jsonl').read_text())
    except HubError as error:
        found.append(type(error).__name__)
print(json.dumps(found))
"""
ROWS = '{"x": 1}\n'


def resolved(permissions: list[bool], home: Path, url: str) -> list[str]:
    """Return the file of a dataset, or the name of the error, for each permission."""
    settings = {'HF_ENDPOINT': url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(home), 'TWINKLE_HUB_DIR': ''}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, json.dumps(permissions)],
        env={**os.environ, **settings},
        check=True,
        timeout=240,
        capture_output=True,
    )
    return json.loads(done.stdout)


def test_private_datasets_need_a_permission(tmp_path: Path) -> None:
    """The token is not sent and the cache is not used without a permission; public datasets need none."""
    with running_hub() as hub:
        hub.files['org/rows'], hub.is_private['org/rows'] = {'train.jsonl': ROWS.encode()}, True
        missing = 'DatasetNotFound'
        assert resolved([False, True, False], tmp_path, hub.url) == [missing, ROWS, missing]
        hub.is_private['org/rows'] = False
        assert resolved([False], tmp_path / 'other', hub.url) == [ROWS]
