"""Training on several ranks is bitwise equal to training in one process, for every mesh of replicas and shards."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures import mesh_digests, torchrun_user_program
from fixtures.mixture_model import build_mixture
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope='module')
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny model whose output head is not tied to the embedding."""
    return build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')


def test_every_mesh_gives_the_digest_of_one_process(model_dir: Path) -> None:
    """Replicas, shards and both together give the results, weights, gradients and random states of one process.

    A rank of a sharded model holds its share of the frozen weights; shares may be padded.
    """
    for (_, shards), line in _equal_digests(model_dir, mesh_count=5, count=4).items():
        assert max(line['held_shares']) <= 1 / shards + 0.01, line['mesh']


@pytest.mark.slow
def test_adapters_of_experts_have_the_digest_of_one_process(tmp_path: Path) -> None:
    """Meshes of two replicas and of two shards give the results of one process for expert adapters."""
    found = _equal_digests(build_mixture(tmp_path), mesh_count=3, count=2)
    assert max(found[1, 2]['held_shares']) < 0.52


def _equal_digests(model_dir: Path, *, mesh_count: int, count: int) -> dict[tuple[int, int], dict[str, Any]]:
    """Check that all ranks have the digest of one process, and return the record of each mesh."""
    done = run_ranks(mesh_digests.__file__, model_dir, mesh_count, count=count)
    assert done.returncode == 0, done.stderr[-4000:]
    records = map(json.loads, done.stdout.splitlines())
    found: dict[tuple[int, int], dict[str, Any]] = {(line['mesh'][0], line['mesh'][1]): line for line in records}
    assert set(found) == set(mesh_digests.MESHES[:mesh_count])
    (expected,) = found[1, 1]['digests']
    for line in found.values():
        assert set(line['digests']) == {expected}, line['mesh']
    return found


@pytest.mark.slow
def test_program_without_a_mesh_is_data_parallel(model_dir: Path, tmp_path: Path) -> None:
    """Training two batches in two processes and a third in one gives bitwise the same results as one process."""
    (alone,), _ = _train(model_dir, tmp_path / 'alone', range(3), count=1)
    ranks, log = _train(model_dir, tmp_path / 'shared', range(2), count=2)
    (resumed,), _ = _train(model_dir, tmp_path / 'shared', range(2, 3), count=1)
    assert [rank['sizes'] for rank in ranks] == [[4, 4], [4, 4]]
    assert [[*rank['losses'], *resumed['losses']] for rank in ranks] == [alone['losses']] * 2
    assert ranks[0]['metrics'] == ranks[1]['metrics']
    assert ranks[0]['digest'] == ranks[1]['digest']
    assert resumed['digest'] == alone['digest']
    assert [rank['refusal'] for rank in ranks] == [alone['refusal']] * 2
    assert 'advantages: 2 entries for 1 features' in alone['refusal']
    assert ranks[0]['shared_loss'] == ranks[1]['shared_loss']
    assert alone['difference'] == []
    for rank in ranks:
        first, second = rank['difference']
        assert 'temperature=2.0' in first
        assert second == first, 'processes whose calls differ have continued'
    assert log.count('trained') == 1, 'not exactly one process has logged information'
    one, two = (next((tmp_path / name).rglob('adapter_model.safetensors')) for name in ('alone', 'shared'))
    assert one.read_bytes() == two.read_bytes()


def _train(model_dir: Path, folder: Path, batches: range, *, count: int) -> tuple[list[dict[str, Any]], str]:
    """Train some batches in `count` processes; return each process's record, and the log."""
    folder.mkdir(exist_ok=True)
    done = run_ranks(torchrun_user_program.__file__, model_dir, folder, batches.start, batches.stop, count=count)
    assert done.returncode == 0, done.stderr[-4000:]
    return [json.loads((folder / f'rank-{rank}.json').read_text()) for rank in range(count)], done.stderr
