"""Four tenants of one base model, at once and alone, as the recipe runs them, on a tiny model."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[3]
STEPS = 8


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A running stack with the reference engines."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'))
    folder = tmp_path_factory.mktemp('stack')
    yield start_stack(StackOptions(state_dir=folder, base_model=str(model), engine='torch'), report=lambda *_: None)
    stop_stack(folder, report=lambda *_: None)


def run(stack: StackState, out: Path, *options: str) -> None:
    """Run the recipe to its end."""
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': stack.read_api_key()}
    command = [sys.executable, '-m', 'examples.cookbook.four_tenants', '--setting', 'cpu', '--out', str(out)]
    sizes = ['--seed', '3', '--model', stack.base_model, '--steps', str(STEPS)]
    done = subprocess.run(
        [*command, *sizes, *options],
        cwd=ROOT,
        env={**environment, 'OMP_NUM_THREADS': '1'},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def logs_of(folder: Path) -> dict[str, dict[str, list]]:
    """Return what each tenant of a run logged."""
    return json.loads((folder / 'bits.json').read_text())


def test_every_tenant_has_the_bits_of_its_solo_run(stack: StackState, tmp_path: Path) -> None:
    """Losses, log-probabilities, samples and final weights are equal to the bit, though passes were shared."""
    run(stack, tmp_path)
    together = logs_of(tmp_path / 'together')
    assert set(together) == {'A', 'B', 'C', 'D'}
    for name, log in together.items():
        assert log['bits'] == logs_of(tmp_path / f'{name}_alone')[name]['bits']
        assert len(log['pass_adapter_counts']) == STEPS
        assert len(set(log['bits'])) > STEPS
    assert max(count for log in together.values() for count in log['pass_adapter_counts']) > 1


def test_a_tenant_alone_learns(stack: StackState, tmp_path: Path) -> None:
    """A tenant that is run alone (`--solo`) lowers its loss."""
    run(stack, tmp_path, '--solo', 'B')
    losses = [json.loads(line)['B_loss'] for line in (tmp_path / 'B_alone' / 'curves.jsonl').read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.5
