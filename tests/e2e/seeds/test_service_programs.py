"""The quick start's programs that train through services run as they are written.

The pages name one address for all of them, with port 8000; where the stack here serves HTTP is put in its place, as its
key is in that of 'your-api-key'.
"""

import ast
import re
from typing import Any

import pytest

from fixtures.seed_programs import MODELS, Run, RunProgram
from twinkle_client import TwinkleClient
from twinkle_client.stack import StackState

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]
DIALECTS = ('english', 'chinese')
_PAGE_URL = 'http://localhost:8000'
_MAX_STEPS = 10
_EPOCHS = 3


@pytest.mark.parametrize('dialect', DIALECTS)
def test_grpo_program_trains_on_right_answers(dialect: str, stack: StackState, run_program: RunProgram) -> None:
    """Right answers score one, what was drawn is what is trained on, and four batches make a step of the optimizer."""
    own_url = stack.http_url.replace('127.0.0.1', 'localhost')
    run = run_program(f'{dialect}/client_grpo', replaced={_PAGE_URL: own_url}, TWINKLE_STATE_DIR=str(stack.state_dir))
    assert run.code == 0, run.out
    steps = _logged_steps(run)
    assert any(0 < step['train/accuracy_reward'] < 1 for step in steps)
    assert any(step['train/format_reward'] > step['train/accuracy_reward'] for step in steps)
    assert all(step['ratio'] == pytest.approx(1, abs=1e-3) for step in steps)
    assert steps[-1]['step_count'] == len(steps) // 4
    assert run.out.count('Saved weights to twinkle://') == _MAX_STEPS
    assert 'Saved final checkpoint: twinkle://' in run.out


@pytest.mark.parametrize('dialect', DIALECTS)
def test_tinker_program_trains_and_saves(dialect: str, stack: StackState, run_program: RunProgram) -> None:
    """The Tinker SDK's own client makes three passes and as many checkpoints, which the catalogue has."""
    own = {_PAGE_URL: stack.http_url, 'your-api-key': stack.read_api_key()}
    run = run_program(f'{dialect}/tinker_sft', replaced=own)
    assert run.code == 0, run.out
    assert _saved_by_newest_run(stack) == _EPOCHS


def test_older_tinker_program_trains_and_saves(stack: StackState, run_program: RunProgram) -> None:
    """So does the one of the README, with another server's address and model."""
    own = {
        'http://www.modelscope.cn/twinkle': stack.http_url,
        'Qwen/Qwen3-30B-A3B-Instruct-2507': MODELS[1].removeprefix('ms://'),
    }
    run = run_program('chinese/readme_tinker_sft', replaced=own, MODELSCOPE_TOKEN=stack.read_api_key())
    assert run.code == 0, run.out
    assert _saved_by_newest_run(stack) == _EPOCHS


def _saved_by_newest_run(stack: StackState) -> int:
    with TwinkleClient(stack.address, stack.read_api_key()) as client:
        newest = client.list_training_runs()[0]
        return len(client.list_checkpoints(newest.run_id))


def _logged_steps(run: Run) -> list[dict[str, Any]]:
    return [ast.literal_eval(found) for found in re.findall(r'Step \d+: (\{.*\})', run.out)]
