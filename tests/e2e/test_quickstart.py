"""The quick start as a new user runs it: a real model learns its name through five processes."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fixtures.source_tree import ROOT
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope='module')
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measurements that one run wrote."""
    folder = tmp_path_factory.mktemp('quickstart')
    command = [sys.executable, '-m', 'examples.quickstart', '--state-dir', str(folder / 'state')]
    result = subprocess.run(
        [*command, '--facts', str(folder / 'facts.json')], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr
    assert StackState.load(folder / 'state') is None
    return json.loads((folder / 'facts.json').read_text())


def test_model_learns_its_name(facts: dict[str, Any]) -> None:
    """No answer contains the name before training, and every answer about the name contains it afterwards."""
    assert not any('Twinkle' in answer for answer in facts['before'])
    assert all('Twinkle' in answer for answer in facts['after'])
    assert facts['last_loss'] < 0.6 * facts['first_loss']


def test_losses_are_stored_with_the_run(facts: dict[str, Any]) -> None:
    """The services store the loss of each of the 17 steps before the traced one."""
    assert facts['stored_losses'] == 17


def test_plain_peft_gives_the_same_answer(facts: dict[str, Any]) -> None:
    """The saved folder gives the same answer in transformers and peft as in the sampler."""
    assert Path(facts['folder']).is_dir()
    assert facts['peft_answer'] == facts['after'][0].strip()


def test_one_trace_shows_every_service(facts: dict[str, Any]) -> None:
    """Training, publishing and sampling produce a single trace through five processes."""
    assert {'client', 'gateway', 'model', 'checkpoint', 'sampler'} <= set(facts['traced_services'])


def test_services_agree_on_the_data_type(facts: dict[str, Any]) -> None:
    """Trainer and sampler load the base model in the same type, which the stack has chosen."""
    assert len(facts['dtypes']) == 1
