"""Each adapter's gradient and optimizer state are on one rank, and results equal those of a run in one process."""

import json
from pathlib import Path
from typing import Any

import pytest

from fixtures import owned_adapters
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks

pytestmark = pytest.mark.timeout(300)


@pytest.mark.slow
def test_owners_share_the_optimizer_states_and_change_no_result(tmp_path: Path) -> None:
    """Runs that continue on a different number of ranks have the same digest as a run in one process.

    The runs include refused batches and steps, deleted and parked adapters, and an optimizer that fails in a step.
    Each adapter's moments and gradient are on one rank, and all ranks own similar numbers of parameters.
    """
    done = run_ranks(owned_adapters.__file__, build_tiny_model(tmp_path, family='qwen3'), count=4)
    assert done.returncode == 0, done.stderr[-4000:]
    runs = [json.loads(line) for line in done.stdout.splitlines()]
    assert [tuple(map(tuple, run['run'])) for run in runs] == list(owned_adapters.RUNS)
    (alone,) = runs[0]['ranks']
    for run in runs:
        ranks = run['ranks']
        assert [len(run['begun']), len(ranks)] == [replicas * shards for replicas, shards in run['run']]
        assert set(run['begun']) == set(runs[0]['begun']), run['run']
        assert {rank['digest'] for rank in ranks} == {alone['digest']}, run['run']
        for kind in ('moment_bytes', 'gradient_bytes'):
            _check_owners(kind, ranks, alone)


def _check_owners(kind: str, ranks: list[dict[str, Any]], alone: dict[str, Any]) -> None:
    owned = [0] * len(ranks)
    for name, expected in alone[kind].items():
        assert expected > 0
        held = [rank[kind][name] for rank in ranks]
        assert sorted(held) == [*[0] * (len(ranks) - 1), expected], (kind, name, held)
        owned[held.index(expected)] += owned_adapters.LORA_RANKS[name]
    assert max(owned) / sum(owned) < 1 / len(ranks) + 0.1, owned
