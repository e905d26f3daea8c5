"""The example of reinforcement learning over the services, with a fleet of two samplers and a tiny model."""

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest

from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.fleet import FleetAdministration
from twinkle_client.rollouts import RunRollouts
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]
MODEL = "MODEL = 'smollm2-135m-instruct'"


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """Running stack with two samplers."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'), family='qwen3')
    folder = tmp_path_factory.mktemp('stack')
    options = StackOptions(state_dir=folder, base_model=str(model), engine='torch', sampler_count=2)
    yield start_stack(options, report=lambda *_: None)
    stop_stack(folder, report=lambda *_: None)


def run(stack: StackState) -> list[float]:
    """Run the example with the model of the stack, and return the reward that it prints for each step."""
    program = (ROOT / 'examples' / 'grpo_over_services.py').read_text()
    assert MODEL in program
    command = [sys.executable, '-c', program.replace(MODEL, f'MODEL = {stack.base_model!r}')]
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': stack.read_api_key()}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [float(line.split()[3]) for line in done.stdout.splitlines() if line.startswith('step')]


def residents(fleet: FleetAdministration) -> list[set[str]]:
    """Wait until each sampler reports a resident adapter, and return the ids of those adapters."""
    while True:
        samplers = [replica for replica in fleet.list_replicas() if replica.service == 'sampler']
        if all(replica.resident_adapters for replica in samplers):
            return [{adapter.adapter_id for adapter in replica.resident_adapters} for replica in samplers]


def test_reward_rises_and_both_samplers_serve_the_run(stack: StackState) -> None:
    """The reward multiplies, each step is stored with its rewards, and both samplers loaded versions of the run.

    `sync_weights` loads a version into one sampler. The other one loads a version when it serves a request for it.
    """
    rewards = run(stack)
    assert rewards[-1] > 0.3 > 6 * rewards[0]
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        (found,) = client.list_training_runs()
        groups = RunRollouts(found.run_id, client=client).list()
        resident = residents(FleetAdministration(client=client))
    assert resident == [{found.run_id}] * 2
    for step, reward in enumerate(rewards):
        stored = [item.reward or 0.0 for group in groups if group.step == step for item in group.rollouts]
        assert sum(stored) / len(stored) == pytest.approx(reward, abs=1e-3)
