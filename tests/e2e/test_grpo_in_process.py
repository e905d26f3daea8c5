"""The in-process example of reinforcement learning with both engines."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from fixtures.tiny_model import build_tiny_model

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


def run(model: Path, *options: str) -> list[dict[str, float]]:
    """Run the example; return the numbers that it prints for each step."""
    command = [sys.executable, '-m', 'examples.grpo_in_process', '--model', str(model), '--learning-rate', '1e-2']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1'}
    done = subprocess.run([*command, *options], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    lines = [line.split() for line in done.stdout.splitlines() if line.startswith('step')]
    names = {'version': 3, 'reward': 5, 'ratio': 7, 'difference': 10}
    return [{name: float(line[column]) for name, column in names.items()} for line in lines]


@pytest.mark.slow
def test_reward_rises_and_every_step_is_on_policy(tmp_path: Path) -> None:
    """Each sync publishes one version, samples have a ratio of 1, and the reward rises."""
    steps = run(build_tiny_model(tmp_path / 'model'), '--steps', '12')
    assert [step['version'] for step in steps] == list(range(1, 13))
    assert all(abs(step['ratio'] - 1) < 1e-5 and step['difference'] < 1e-5 for step in steps)
    assert steps[-1]['reward'] > 2 * steps[0]['reward']


@pytest.mark.slow
def test_workers_on_ray_learn_like_one_process(tmp_path: Path) -> None:
    """Two trainers and two samplers on Ray give the same numbers as one process, and the reward rises above 0.9."""
    model, options = build_tiny_model(tmp_path / 'model'), ('--steps', '30')
    steps = run(model, *options, '--workers', '2')
    assert steps == run(model, *options)
    assert steps[0]['reward'] < 0.5
    assert steps[-1]['reward'] > 0.9


@pytest.mark.slow
def test_vllm_samples_on_policy_after_every_sync(tmp_path: Path) -> None:
    """The log-probabilities of vLLM and the trainer agree within 1e-4 at every version."""
    steps = run(build_tiny_model(tmp_path / 'model'), '--steps', '4', '--engine', 'vllm')
    assert [step['version'] for step in steps] == [1, 2, 3, 4]
    assert all(abs(step['ratio'] - 1) < 1e-4 and step['difference'] < 1e-4 for step in steps)
