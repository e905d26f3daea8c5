"""Tests of the quick-start programs that train with the services, on a running stack.

Only the address, the key and, in the older program, the model are replaced by those of the stack.
"""

import ast
import re
from typing import Any

import pytest

from fixtures.seed_programs import MODELS, Run, RunProgram
from fixtures.tinker_sdk import program_status
from twinkle_client import TwinkleClient
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
LANGUAGES = ('english', 'chinese')
_PAGE_URL = 'http://localhost:8000'
"""Address in all programs except the older one."""
_MAX_STEPS = 10
"""Number of times that the GRPO programs save weights."""
_EPOCHS = 3
"""Number of epochs of the Tinker SDK programs."""


@pytest.mark.parametrize('language', LANGUAGES)
def test_grpo_program_trains_and_saves(language: str, stack: StackState, run_program: RunProgram) -> None:
    """Some accuracy rewards are between 0 and 1, training is on policy, and each optimizer step has four batches."""
    stack_url = stack.http_url.replace('127.0.0.1', 'localhost')
    run = run_program(
        f'{language}/client_grpo', replaced={_PAGE_URL: stack_url}, TWINKLE_STATE_DIR=str(stack.state_dir)
    )
    assert run.code == 0, run.out
    steps = _logged_steps(run)
    assert any(0 < step['train/accuracy_reward'] < 1 for step in steps)
    assert any(step['train/format_reward'] > step['train/accuracy_reward'] for step in steps)
    assert all(step['ratio'] == pytest.approx(1, abs=1e-3) for step in steps)
    assert steps[-1]['step_count'] == len(steps) // 4
    assert run.out.count('Saved weights to twinkle://') == _MAX_STEPS
    assert 'Saved final checkpoint: twinkle://' in run.out


@pytest.mark.parametrize('language', LANGUAGES)
def test_tinker_program_trains_and_saves(language: str, stack: StackState, run_program: RunProgram) -> None:
    """The Tinker SDK program saves a checkpoint for each of its three epochs."""
    replaced = {_PAGE_URL: stack.http_url, 'your-api-key': stack.read_api_key()}
    run = run_program(f'{language}/tinker_sft', replaced=replaced)
    assert program_status(run.code, '') == 0, run.out
    assert _checkpoint_count(stack) == _EPOCHS


def test_older_tinker_program_trains_and_saves(stack: StackState, run_program: RunProgram) -> None:
    """The README's program, with another address and model, saves a checkpoint for each epoch."""
    replaced = {
        'http://www.modelscope.cn/twinkle': stack.http_url,
        'Qwen/Qwen3-30B-A3B-Instruct-2507': MODELS[1].removeprefix('ms://'),
    }
    run = run_program('chinese/readme_tinker_sft', replaced=replaced, MODELSCOPE_TOKEN=stack.read_api_key())
    assert program_status(run.code, '') == 0, run.out
    assert _checkpoint_count(stack) == _EPOCHS


def _checkpoint_count(stack: StackState) -> int:
    """Return the number of checkpoints of the newest training run."""
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        newest = client.list_training_runs()[0]
        return len(client.list_checkpoints(newest.run_id))


def _logged_steps(run: Run) -> list[dict[str, Any]]:
    return [ast.literal_eval(found) for found in re.findall(r'Step \d+: (\{.*\})', run.out)]
