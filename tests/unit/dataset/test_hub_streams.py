"""A stream reads the files of a hub over the network.

The hub is a server on a loopback socket. Each program is a process, because the client reads its settings once.
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from fixtures.fake_hub import running_hub

PROGRAM = """
import itertools, json, sys
from twinkle.dataset import DatasetError, DatasetMeta, IterableDataset
from twinkle.hub import HubError
found = []
for dataset_id, split in json.loads(sys.argv[1]):
    try:
        dataset = IterableDataset(DatasetMeta(dataset_id, split=split, data_slice=slice(1, None)))
        found.append([[row['x'] for row in dataset] for _ in range(2)])
    except (DatasetError, HubError) as error:
        found.append([type(error).__name__, str(error)])
print(json.dumps(found))
"""


def streamed(requests: list[Any], home: Path, url: str, **environment: str) -> list[Any]:
    """Return the results of a program that streams datasets from the hub at an address."""
    settings = {'HF_ENDPOINT': url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(home), 'TWINKLE_HUB_DIR': ''}
    done = subprocess.run(
        [sys.executable, '-c', PROGRAM, json.dumps(requests)],
        env={**os.environ, **settings, **environment},
        check=True,
        timeout=240,
        capture_output=True,
    )
    return json.loads(done.stdout)


def test_files_are_read_over_the_network(tmp_path: Path) -> None:
    """Every iteration reads the rows of one split, no data file is stored, and unknown names are refused."""
    lines = b''.join(json.dumps({'x': number}).encode() + b'\n' for number in range(4))
    with running_hub() as hub:
        hub.files['org/rows'], hub.is_private['org/rows'] = {'data/train.jsonl': lines, 'data/test.jsonl': b'-'}, False
        requests = [('hf://org/rows', 'train'), ('org/rows', 'dev'), ('hf://org/absent', 'train')]
        rows, no_split, no_dataset = streamed(requests, tmp_path, hub.url)
        assert rows == [[1, 2, 3]] * 2
        assert no_split[0] == 'DatasetError'
        assert 'test, train' in no_split[1]
        assert no_dataset[0] == 'DatasetNotFound'
        assert {path for path in hub.reads if path.endswith('.jsonl')} == {'data/train.jsonl'}
    assert not [path for path in tmp_path.rglob('*') if path.is_file() and lines in path.read_bytes()]


def test_offline_programs_do_not_connect(tmp_path: Path) -> None:
    """A dataset that is not on this machine is refused without a connection if the environment forbids connections."""
    with running_hub() as hub:
        [refused] = streamed([('hf://org/rows', 'train')], tmp_path, hub.url, HF_HUB_OFFLINE='1')
        assert refused[0] == 'HubUnreachable'
        assert hub.reads == []
        assert not hub.asked.is_set()
