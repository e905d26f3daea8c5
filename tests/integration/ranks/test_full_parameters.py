"""Full-parameter runs over sharded weights equal those of one process within rounding, and resume on other meshes."""

import json
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

from fixtures import full_run_ranks
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]

REFUSALS = {
    'damaged': 'SnapshotMismatch',
    'optimizer': 'InvalidComponentOptions',
    'forward': 'InvalidArgument',
    'health': 'InvalidArgument',
    'values': 'InvalidArgument',
    'merge': 'InvalidArgument',
    'one rank': 'InvalidModelFolder',
}
"""Error of each call that a sharded run refuses."""


def test_sharded_runs_agree_with_one_process(tmp_path: Path) -> None:
    """Losses, norms and gradients agree within rounding; a repeated run on the same mesh is bitwise equal.

    Each rank holds its share of weights, gradients and moments. The meshes are one process, three ranks with uneven
    shares, and two replicas of two shards. A checkpoint that is loaded on another mesh has bitwise equal weights, and
    a snapshot, as the journal of a model service stores it, continues with bitwise the same results as the checkpoint.
    """
    model_dir = build_tiny_model(tmp_path / 'model', family='qwen3')
    alone = _run(model_dir, tmp_path, 'alone', (1, 1))
    meshes = {'uneven': (1, 3), 'replicas': (2, 2)}
    expected = load_file(tmp_path / 'alone.safetensors')
    for name, (replicas, shards) in meshes.items():
        found = _run(model_dir, tmp_path, name, (replicas, shards), 'alone', *(['uneven'] if name != 'uneven' else []))
        assert found['losses'] == pytest.approx(alone['losses'], rel=1e-6)
        assert found['norms'] == pytest.approx(alone['norms'], rel=1e-5)
        assert found['is_repeated']
        assert found['held'] <= 1 / shards + 0.02
        assert found['refusals'] == REFUSALS
        gradient = load_file(tmp_path / f'{name}.safetensors')
        assert gradient.keys() == expected.keys()
        for path, tensor in gradient.items():
            assert float((tensor - expected[path]).norm()) <= 1e-5 * float(expected[path].norm()), path
        for losses in found['continued'].values():
            assert losses == pytest.approx(alone['continued']['alone'], rel=1e-5)
        assert found['restored'] == found['continued']
    again = _run(model_dir, tmp_path, 'again', (1, 1), *meshes)
    for losses in again['continued'].values():
        assert losses == pytest.approx(alone['continued']['alone'], rel=1e-5)
    assert again['restored'] == again['continued']
    assert alone['refusals'] == again['refusals'] == {'damaged': 'SnapshotMismatch'}


def _run(model_dir: Path, folder: Path, name: str, mesh: tuple[int, int], *checkpoints: str) -> dict[str, Any]:
    paths = [folder / checkpoint for checkpoint in checkpoints]
    done = run_ranks(full_run_ranks.__file__, model_dir, folder, name, *mesh, *paths, count=mesh[0] * mesh[1])
    assert done.returncode == 0, done.stderr[-4000:]
    return json.loads((folder / f'{name}.json').read_text())
