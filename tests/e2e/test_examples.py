"""The examples that need a running stack, against a tiny model."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackOptions, StackState, start_stack, stop_stack

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[StackState]:
    """A running stack."""
    model = build_tiny_model(tmp_path_factory.mktemp('model'))
    folder = tmp_path_factory.mktemp('stack')
    yield start_stack(StackOptions(state_dir=folder, base_model=str(model), engine='torch'), report=lambda *_: None)
    stop_stack(folder, report=lambda *_: None)


def run(example: str, stack: StackState, *arguments: str) -> str:
    """Return what an example prints."""
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': stack.read_api_key()}
    command = [sys.executable, '-m', f'examples.{example}', *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_tenants_train_side_by_side(stack: StackState) -> None:
    """Every tenant takes its steps and learns, and each step has its receipt."""
    lines = run('many_tenants', stack).splitlines()
    for tenant in ('amber', 'basil', 'coral'):
        losses = [float(line.split()[4]) for line in lines if line.startswith(tenant)]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
    assert all('adapters in its pass' in line for line in lines)


def test_custom_loss_falls(stack: StackState) -> None:
    """A loss that is computed by the program is learned from, and undone."""
    lines = run('custom_loss', stack).splitlines()
    losses = [float(line.split()[3].rstrip(',')) for line in lines if line.startswith('step')]
    assert losses[-1] < losses[0]
    assert lines[-1].endswith('after 4')


def test_chat_streams_its_answer_and_its_counts(stack: StackState) -> None:
    """OpenAI's own SDK gets an answer of the base model, and is told which version gave it and what it took."""
    lines = run('openai_chat', stack, f'http://{stack.http_address}/v1', stack.base_model, 'Why?').splitlines()
    assert "'version': 0" in lines[-2]
    counts = [int(word) for word in lines[-1].split() if word.isdigit()]
    assert counts[0] > 0
    assert 0 < counts[1] <= 64
