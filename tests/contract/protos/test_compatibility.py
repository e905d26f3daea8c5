"""Tests that the comparison with the released contracts finds incompatible changes."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.source_tree import ROOT

BUF = Path(sys.executable).parent / 'buf'
INCOMPATIBLE = 100
"""Exit status of buf if it finds incompatible changes."""
OPERATION, TENSOR = 'model/v1/operation.proto', 'tensor/v1/tensor.proto'
ROLLOUTS, TRAINING = 'gateway/v1/rollout_service.proto', 'model/v1/training_service.proto'
BREAKING = {
    'a renamed method': (TRAINING, r'rpc Execute\(', 'rpc Run('),
    'a deleted method': (TRAINING, r'rpc CancelOperation\(.*?;', ''),
    'another request': (TRAINING, r'rpc Execute\(ExecuteRequest\)', 'rpc Execute(TrainRequest)'),
    'a stream instead of one response': (TRAINING, r'returns \(ExecuteResponse\)', 'returns (stream ExecuteResponse)'),
    'a renamed service': (ROLLOUTS, 'service RolloutService {', 'service Rollouts {'),
    'a deleted service': (ROLLOUTS, r'service RolloutService \{.*', ''),
    'another field type': (OPERATION, 'string adapter_id = 1;', 'bytes adapter_id = 1;'),
    'another field number': (OPERATION, 'string adapter_id = 1;', 'string adapter_id = 99;'),
    'a renamed field': (OPERATION, 'string adapter_id = 1;', 'string run_id = 1;'),
    'a repeated field': (TENSOR, 'bytes sha256 = 4;', 'repeated bytes sha256 = 4;'),
    'a deleted field': (TENSOR, 'bytes sha256 = 4;', ''),
    'a deleted enum value': (TENSOR, 'DTYPE_FLOAT64 = 8;', ''),
    'a renamed enum value': (TENSOR, 'DTYPE_FLOAT64 = 8;', 'DTYPE_DOUBLE = 8;'),
    'another enum number': (TENSOR, 'DTYPE_FLOAT64 = 8;', 'DTYPE_FLOAT64 = 9;'),
}
"""Incompatible changes: the file, a pattern of its text and the replacement."""
COMPATIBLE = {
    'no change': (TENSOR, 'DTYPE_FLOAT64 = 8;', 'DTYPE_FLOAT64 = 8;'),
    'a new method': (TRAINING, r'rpc Execute\(', 'rpc Run(ExecuteRequest) returns (ExecuteResponse);\n  rpc Execute('),
    'a new service': (ROLLOUTS, 'service RolloutService {', 'service Others {}\nservice RolloutService {'),
    'a new field': (TENSOR, 'bytes sha256 = 4;', 'bytes sha256 = 4;\n  bytes sha512 = 5;'),
    'a new enum value': (TENSOR, 'DTYPE_FLOAT64 = 8;', 'DTYPE_FLOAT64 = 8;\n  DTYPE_INT8 = 9;'),
}
"""Compatible changes, likewise."""


def _status_after(change: tuple[str, str, str], folder: Path) -> tuple[int, str]:
    """Apply a change to a copy of the contracts, and return the exit status and the output of the comparison."""
    name, before, after = change
    shutil.copytree(ROOT / 'protos', folder / 'protos')
    shutil.copy(ROOT / 'buf.yaml', folder)
    path = folder / 'protos' / 'twinkle' / 'api' / name
    changed, count = re.subn(before, after, path.read_text(), flags=re.DOTALL)
    assert count == 1
    path.write_text(changed)
    image = folder / 'changed.binpb'
    subprocess.run([BUF, 'build', '--output', image], cwd=folder, check=True)
    compared = [BUF, 'breaking', image, '--against', 'protos/released.binpb', '--config', 'buf.yaml']
    found = subprocess.run(compared, cwd=folder, capture_output=True, text=True, check=False)
    return found.returncode, found.stdout + found.stderr


@pytest.mark.parametrize('change', BREAKING.values(), ids=BREAKING)
def test_incompatible_change_is_found(tmp_path: Path, change: tuple[str, str, str]) -> None:
    """A change that breaks clients of the released contracts is reported."""
    status, output = _status_after(change, tmp_path)
    assert status == INCOMPATIBLE, output


@pytest.mark.parametrize('change', COMPATIBLE.values(), ids=COMPATIBLE)
def test_compatible_change_is_accepted(tmp_path: Path, change: tuple[str, str, str]) -> None:
    """The current contracts, and additions to them, are compatible with the released ones."""
    status, output = _status_after(change, tmp_path)
    assert status == 0, output
