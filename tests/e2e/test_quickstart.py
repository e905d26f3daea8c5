"""The quick start as a new user runs it: a real model learns its name with five processes."""

import json
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from fixtures.source_tree import ROOT
from twinkle_client import TwinkleClient
from twinkle_client.rollouts import EVALUATION, RunRollouts
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope='module')
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Measurements that one run wrote, and data of the running services: `session`, `link` and `rollouts`."""
    folder = tmp_path_factory.mktemp('quickstart')
    options = ['--stay', '--state-dir', str(folder / 'state'), '--facts', str(folder / 'facts.json')]
    command = [sys.executable, '-m', 'examples.quickstart', *options]
    output: list[str] = []
    with (
        (folder / 'errors').open('w') as errors,
        subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=errors, text=True) as process,
    ):
        assert process.stdout is not None
        for line in process.stdout:
            output.append(line)
            if line.startswith('Console: '):
                break
        link = output[-1].removeprefix('Console: ').strip()
        shown = _shown(link, folder) if process.poll() is None else {}
        process.send_signal(signal.SIGINT)
        output += process.stdout
    assert process.returncode == 0, ''.join(output) + (folder / 'errors').read_text()
    assert StackState.load(folder / 'state') is None
    return {**json.loads((folder / 'facts.json').read_text()), **shown}


def _shown(link: str, folder: Path) -> dict[str, Any]:
    """Return the session of the printed link, the page that the link opens, and the run's stored answers."""
    address, _, secret_and_page = link.partition('/console/#/login/')
    secret, _, page = secret_and_page.partition('/')
    response = httpx.post(f'{address}/console/api/login', json={'link': secret})
    state = StackState.load(folder / 'state')
    assert state is not None
    with TwinkleClient(state.address, state.read_api_key()) as client:
        stored = RunRollouts(page.removeprefix('runs/'), client=client)
        groups = stored.list(group_id=EVALUATION)
        rollouts = {group.step: [stored.get(item.rollout_id) for item in group.rollouts] for group in groups}
    return {'session': response.raise_for_status().json(), 'page': page, 'rollouts': rollouts}


def test_link_opens_the_run_in_the_console(facts: dict[str, Any]) -> None:
    """The link that the quick start prints logs a browser in with the stack's key, and opens the run."""
    assert {'train', 'sample'} <= set(facts['session']['scopes'])
    assert facts['page'] == f'runs/{facts["run_id"]}'


def test_answers_are_stored_with_tokens(facts: dict[str, Any]) -> None:
    """The answers before and after training are rollouts with tokens, log-probabilities and versions."""
    before, after = facts['rollouts'][0], facts['rollouts'][18]
    for rollouts, answers, version in ((before, facts['before'], 0), (after, facts['after'], facts['version'])):
        assert [rollout.completion_text for rollout in rollouts] == answers
        for rollout in rollouts:
            assert len(rollout.token_ids) == len(rollout.logprobs) > 0
            assert (rollout.logprobs <= 0).all()
            assert [(span.version, span.end_token) for span in rollout.version_spans] == [
                (version, len(rollout.token_ids))
            ]
    questions = [[rollout.prompt_chat['messages'] for rollout in rollouts] for rollouts in (before, after)]
    assert questions[0] == questions[1]


def test_model_learns_its_name(facts: dict[str, Any]) -> None:
    """No answer contains the name before training, and every answer about the name contains it afterwards."""
    assert not any('Twinkle' in answer for answer in facts['before'])
    assert all('Twinkle' in answer for answer in facts['after'])
    assert facts['last_loss'] < 0.6 * facts['first_loss']


def test_losses_are_stored_with_the_run(facts: dict[str, Any]) -> None:
    """The services have the loss of each of the 17 steps before the traced step."""
    assert facts['stored_losses'] == 17


def test_plain_peft_gives_the_same_answer(facts: dict[str, Any]) -> None:
    """The saved folder gives the same answer in transformers and peft as in the sampler."""
    assert Path(facts['folder']).is_dir()
    assert facts['peft_answer'] == facts['after'][0].strip()


def test_one_trace_shows_every_service(facts: dict[str, Any]) -> None:
    """Training, publishing and sampling give a single trace through five processes."""
    assert {'client', 'gateway', 'model', 'checkpoint', 'sampler'} <= set(facts['traced_services'])


def test_services_agree_on_the_data_type(facts: dict[str, Any]) -> None:
    """Trainer and sampler load the base model in the same type, which the stack selected."""
    assert len(facts['dtypes']) == 1
