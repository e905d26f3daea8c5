"""Rollouts train on environments of verifiers, OpenEnv and reasoning-gym, in process and over the services."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackState

FOLDER = Path(__file__).parent
pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]


def run(library: str, packages: str, folder: Path, stack: StackState, api_key: str) -> dict[str, Any]:
    """Run the program for a library, with the packages of a requirements.txt, and return its results.

    `./run test --all` installs each requirements.txt into the folder of its name in the environment.
    """
    model = build_tiny_model(folder / 'model', family='qwen3')
    paths = [str(Path(sys.prefix) / packages), str(ROOT / 'tests'), os.environ.get('PYTHONPATH', '')]
    environment = {
        **os.environ,
        'PYTHONPATH': os.pathsep.join(filter(None, paths)),
        'OMP_NUM_THREADS': '1',
        'HF_HUB_OFFLINE': '1',
        'HOME': str(folder),
    }
    arguments = [library, str(model), stack.address, api_key, stack.base_model]
    command = [sys.executable, str(FOLDER / 'program.py'), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


def check_learning(results: dict[str, Any]) -> None:
    """Check that the reward doubles in process and over the services."""
    for means in (results['in process'], results['over services']):
        assert means[-1] > 2 * means[0] > 0, means


def test_environments_of_verifiers_are_learned(tmp_path: Path, tiny_stack: StackState, tenant_key: str) -> None:
    """The rewards, metrics, tools and limits of an environment of verifiers are those of the rollouts."""
    results = run('verifiers', 'verifiers', tmp_path, tiny_stack, tenant_key)
    check_learning(results)
    assert results['contract'] == [[0.5, 0]]
    assert [item['facts']['turns'] for item in results['document']] == [1.0] * 8
    opening = ['system: Write letters.', 'user: Write a word.']
    calling, *answers = results['tools']['messages'][2:]
    assert results['tools']['messages'][:2] == opening
    assert calling.startswith('assistant: So.')
    assert answers == ['tool: The sum is 3.', 'assistant: ab', 'user: More.', 'assistant: cd12']
    assert results['tools']['facts'] == {'letters': pytest.approx((2 / 3 + 1 + 0.5) / 3), 'turns': 3.0}
    assert results['tools']['reward'] == results['tools']['facts']['letters']
    assert results['tools']['end'] == 'done'
    assert results['refused']['end'] == 'max_turns'
    assert results['refused']['facts'] == {'letters': pytest.approx(2 / 3), 'turns': 4.0, 'refused_turns': 1.0}


def test_environments_of_openenv_are_learned(tmp_path: Path, tiny_stack: StackState, tenant_key: str) -> None:
    """An environment gives the same chats and rewards in this process and behind a server."""
    results = run('openenv', 'openenv', tmp_path, tiny_stack, tenant_key)
    check_learning(results)
    assert results['contract'] == results['served contract'] == [[0.5, 1], [0.5, 1]]
    assert [item['messages'][:2] for item in results['document']] == [['system: Act.', 'user: Write a word.']] * 4
    turns = ['assistant: ab12', 'user: More.'] * 2
    assert results['chat']['messages'] == ['system: Act.', 'user: Write a word.', *turns]
    assert results['chat']['reward'] == 1.0
    assert results['chat']['end'] == 'done'


def test_tasks_of_reasoning_gym_keep_the_contract(tmp_path: Path, tiny_stack: StackState, tenant_key: str) -> None:
    """The right answer of a task has the full score, and a wrong answer a lower one."""
    (((right, _),), ((wrong, _),)) = run('reasoning-gym', 'verifiers', tmp_path, tiny_stack, tenant_key)['contract']
    assert right == 1.0
    assert wrong < 1.0
