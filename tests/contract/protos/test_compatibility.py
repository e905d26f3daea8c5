"""Tests that the comparison with the released contracts finds incompatible changes."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.source_tree import ROOT

BUF = Path(sys.executable).parent / 'buf'
INCOMPATIBLE = 100
"""Exit status of buf if it finds incompatible changes."""
CHANGES = {
    'a renamed method': ('model/v1/training_service.proto', 'rpc Execute(', 'rpc Run('),
    'a renamed service': ('checkpoint/v1/checkpoint_service.proto', 'service CheckpointService {', 'service Other {'),
    'a reused field number': ('model/v1/operation.proto', 'string adapter_id = 1;', 'bytes adapter_id = 1;'),
}
"""Incompatible changes: the file, its text and the replacement."""


@pytest.mark.parametrize('change', [None, *CHANGES])
def test_incompatible_change_is_found(tmp_path: Path, change: str | None) -> None:
    """A change that breaks clients of the released contracts is reported; the current contracts are compatible."""
    shutil.copytree(ROOT / 'protos', tmp_path / 'protos')
    shutil.copy(ROOT / 'buf.yaml', tmp_path)
    if change is not None:
        name, before, after = CHANGES[change]
        path = tmp_path / 'protos' / 'twinkle' / 'api' / name
        assert before in path.read_text()
        path.write_text(path.read_text().replace(before, after))
    image = tmp_path / 'changed.binpb'
    subprocess.run([BUF, 'build', '--output', image], cwd=tmp_path, check=True)
    compared = [BUF, 'breaking', image, '--against', 'protos/released.binpb', '--config', 'buf.yaml']
    found = subprocess.run(compared, cwd=tmp_path, capture_output=True, check=False)
    assert found.returncode == (0 if change is None else INCOMPATIBLE), found.stderr
