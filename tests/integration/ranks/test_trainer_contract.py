"""A trainer on several processes passes the contract suite, and ends if an adapter differs between processes."""

import re
from pathlib import Path

import pytest

from fixtures import different_ranks, trainer_contract
from fixtures.tiny_model import build_tiny_model
from fixtures.torchrun import run_ranks
from twinkle_services.model.backends.group.exit_group import LOST_STATUS

pytestmark = pytest.mark.timeout(300)


REFUSALS = {
    'dp': '',
    'fsdp': '',
    'ulysses': 'full-parameter training does not support ulysses_size',
    'tp': 'full-parameter training does not support layers divided by tp or pp',
    'pp': 'full-parameter training does not support layers divided by tp or pp',
}
"""Error of each axis for full-parameter training; empty if the axis supports it."""


@pytest.mark.parametrize('axis', REFUSALS)
@pytest.mark.slow
def test_a_mesh_fulfils_the_contract_of_one_process(axis: str) -> None:
    """All contract tests of trainers pass on each mesh; some axes refuse full-parameter training instead."""
    done = run_ranks(trainer_contract.__file__, f'{{"{axis}_size": 2}}', count=2)
    failed = re.findall(r'FAILED \S+::(\w+)', done.stdout)
    assert ' passed' in done.stdout, done.stdout[-4000:] + done.stderr[-2000:]
    if REFUSALS[axis]:
        assert failed == ['test_full_parameter_adapter_excludes_all_others']
        assert REFUSALS[axis] in done.stdout
    else:
        assert done.returncode == 0, done.stdout[-4000:]


@pytest.mark.slow
def test_processes_whose_adapters_differ_end(tmp_path: Path) -> None:
    """If an adapter differs on one process, the processes end at the next snapshot."""
    done = run_ranks(different_ranks.__file__, build_tiny_model(tmp_path), count=2)
    assert done.returncode
    assert 'equal snapshot' in done.stdout
    assert 'different snapshot' not in done.stdout
    assert 'snapshot: done, state' in done.stdout + done.stderr
    assert f'exitcode: {LOST_STATUS}' in done.stderr or f'exitcode  : {LOST_STATUS}' in done.stderr
