"""The four-tenants recipe on a tiny model: concurrent and solo runs."""

import itertools
import json
import math
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle.data_format import VersionSpan
from twinkle_client import TwinkleClient
from twinkle_client.administration import KeyAdministration
from twinkle_client.rollouts import RunRollouts
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]
STEPS = 8


def start(stack: StackState, out: Path, *options: str) -> 'subprocess.Popen[str]':
    """Start the recipe with all its output in one pipe."""
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': stack.read_api_key()}
    command = [sys.executable, '-m', 'examples.cookbook.four_tenants', '--setting', 'cpu', '--out', str(out)]
    return subprocess.Popen(
        [*command, '--seed', '3', '--model', stack.base_model, *options],
        cwd=ROOT,
        env={**environment, 'OMP_NUM_THREADS': '1'},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def run(stack: StackState, out: Path, *options: str, steps: int = STEPS) -> None:
    """Run the recipe and wait until it exits."""
    with start(stack, out, '--steps', str(steps), *options) as process:
        assert process.stdout is not None
        printed = process.stdout.read()
    assert process.returncode == 0, printed
    assert 'tracker' not in printed, 'values were not stored'


def logs_of(folder: Path) -> dict[str, dict[str, list]]:
    """Return the log of each tenant of a run."""
    return json.loads((folder / 'bits.json').read_text())


def test_two_steps_of_one_tenant_write_finite_losses(tiny_stack: StackState, tmp_path: Path) -> None:
    """A short run of one tenant writes a plot, a log, and a finite loss for each step."""
    run(tiny_stack, tmp_path, '--solo', 'B', steps=2)
    folder = tmp_path / 'B_alone'
    losses = [json.loads(line)['B_loss'] for line in (folder / 'curves.jsonl').read_text().splitlines()]
    assert len(losses) == 2
    assert all(math.isfinite(loss) for loss in losses)
    assert (folder / 'curves.png').read_bytes().startswith(b'\x89PNG')
    assert logs_of(folder)


def test_the_tenant_with_rewards_stores_its_rollouts(tiny_stack: StackState, tmp_path: Path) -> None:
    """The server still has the completions of each step after the run, with rewards, tokens and versions."""
    run(tiny_stack, tmp_path, '--solo', 'C', steps=2)
    with TwinkleClient(tiny_stack.address, tiny_stack.read_api_key()) as admin:
        _, secret = KeyAdministration(client=admin).create_key('tenant-c', scopes=['sample'])
    with TwinkleClient(tiny_stack.address, secret) as client:
        rollouts = RunRollouts(client.list_training_runs()[0].run_id, client=client)
        groups = rollouts.list()
        assert [(group.step, group.group_id) for group in groups] == [
            (step, f'{prompt:04}') for step in (1, 0) for prompt in range(4)
        ]
        for group in groups:
            assert [item.reward for item in group.rollouts if item.reward is None or item.advantage is None] == []
            assert {item.newest_version for item in group.rollouts} == {group.step + 1}
        last = rollouts.get(groups[3].rollouts[-1].rollout_id)
    assert last.prompt_chat == {'messages': [{'role': 'user', 'content': 'Describe the sea.'}]}
    assert last.token_ids is not None
    assert last.logprobs is not None
    assert len(last.token_ids) == len(last.logprobs) <= 12
    assert (last.logprobs <= 0).all()
    assert last.version_spans == [VersionSpan(version=2, begin_token=0, end_token=len(last.token_ids))]


@pytest.mark.slow
def test_results_of_shared_passes_equal_those_of_solo_runs(tiny_stack: StackState, tmp_path: Path) -> None:
    """The digests of each tenant's results and weights equal those of a solo run, although passes were shared."""
    run(tiny_stack, tmp_path)
    together = logs_of(tmp_path / 'together')
    assert set(together) == {'A', 'B', 'C', 'D'}
    for name, log in together.items():
        assert log['bits'] == logs_of(tmp_path / f'{name}_alone')[name]['bits']
        assert len(log['pass_adapter_counts']) == STEPS
        assert len(set(log['bits'])) > STEPS
    assert max(count for log in together.values() for count in log['pass_adapter_counts']) > 1


@pytest.mark.slow
def test_solo_tenant_learns(tiny_stack: StackState, tmp_path: Path) -> None:
    """A tenant that runs alone (`--solo`) lowers its loss."""
    run(tiny_stack, tmp_path, '--solo', 'B')
    losses = [json.loads(line)['B_loss'] for line in (tmp_path / 'B_alone' / 'curves.jsonl').read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5


@pytest.mark.slow
def test_interrupt_stops_all_tenants_and_saves_the_curves(tiny_stack: StackState, tmp_path: Path) -> None:
    """An interrupted run saves the curves and exits with status 130."""
    with start(tiny_stack, tmp_path, '--steps', '400') as process:
        assert process.stdout is not None
        steps = (line for line in process.stdout if line.startswith('step'))
        shown = list(itertools.islice(steps, 2))
        process.send_signal(signal.SIGINT)
        printed = process.stdout.read()
    assert len(shown) == 2
    assert process.returncode == 130, printed
    assert 'Traceback' not in printed
    assert (tmp_path / 'together' / 'curves.jsonl').read_text().count('\n') > 1
    assert (tmp_path / 'together' / 'curves.png').read_bytes().startswith(b'\x89PNG')
