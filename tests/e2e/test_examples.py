"""Examples that need a running stack, on a tiny model."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from twinkle_client import TwinkleClient
from twinkle_client.metrics import RunMetrics
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(300)
ROOT = Path(__file__).resolve().parents[2]


def run(example: str, stack: StackState, *arguments: str, api_key: str = '') -> str:
    """Run an example and return its output; `api_key` replaces the administrator's key."""
    return run_python(['-m', f'examples.{example}', *arguments], stack, api_key=api_key).stdout


def run_python(arguments: list[str], stack: StackState, *, api_key: str = '') -> 'subprocess.CompletedProcess[str]':
    """Run a Python program; `api_key` replaces the administrator's key."""
    key = api_key or stack.read_api_key()
    environment = {**os.environ, 'TWINKLE_SERVER_URL': stack.address, 'TWINKLE_API_KEY': key}
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done


def test_tenants_train_side_by_side(tiny_stack: StackState) -> None:
    """Every tenant of the example learns, and each step has a receipt."""
    lines = run('many_tenants', tiny_stack).splitlines()
    for tenant in ('amber', 'basil', 'coral'):
        losses = [float(line.split()[4]) for line in lines if line.startswith(tenant)]
        assert len(losses) == 6
        assert losses[-1] < losses[0]
    assert all('adapters in its pass' in line for line in lines)


def test_custom_loss_falls(tiny_stack: StackState, tenant_key: str) -> None:
    """A loss that the program computes falls, and an undo reverts steps."""
    lines = run('custom_loss', tiny_stack, api_key=tenant_key).splitlines()
    losses = [float(line.split()[3].rstrip(',')) for line in lines if line.startswith('step')]
    assert losses[-1] < losses[0]
    assert lines[-1].endswith('count is 4')


def test_chat_streams_its_answer_and_its_counts(tiny_stack: StackState, tenant_key: str) -> None:
    """The OpenAI SDK receives an answer of the base model with its version and token counts."""
    arguments = (f'http://{tiny_stack.http_address}/v1', tiny_stack.base_model, 'Why?')
    lines = run('openai_chat', tiny_stack, *arguments, api_key=tenant_key).splitlines()
    assert "'version': 0" in lines[-2]
    counts = [int(word) for word in lines[-1].split() if word.isdigit()]
    assert counts[0] > 0
    assert 0 < counts[1] <= 64


def test_loop_of_the_tracking_page_stores_its_numbers(tiny_stack: StackState, tenant_key: str) -> None:
    """The first program of docs/tracking.md stores each step's loss and tokens in addition to the `train/` metrics."""
    program = (ROOT / 'docs' / 'tracking.md').read_text().split('```')[1].removeprefix('python\n')
    model = "MODEL = 'smollm2-135m-instruct'"
    assert model in program
    done = run_python(
        ['-c', program.replace(model, f'MODEL = {tiny_stack.base_model!r}')], tiny_stack, api_key=tenant_key
    )
    assert 'tracker' not in done.stderr
    with TwinkleClient(tiny_stack.address, tenant_key) as client:
        (found,) = client.list_training_runs()
        metrics = RunMetrics(found.run_id, client=client).get()
    losses = metrics['loss'].values
    assert [name for name in metrics if not name.startswith('train/')] == ['loss', 'tokens']
    assert metrics['loss'].steps == list(range(len(losses)))
    assert losses[-1] < losses[0]
