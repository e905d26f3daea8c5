"""An adapter is trained from a streamed dataset of a hub through the data service, and resumed after kills."""

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from safetensors.numpy import load_file

from fixtures.fake_hub import FakeHub, running_hub
from fixtures.source_tree import ROOT
from fixtures.tinker_sdk import tracebacks
from fixtures.tiny_model import build_tiny_model
from twinkle_client import TwinkleClient
from twinkle_client.stack import StackOptions, StackState, revive_stack, start_stack, stop_stack
from twinkle_client.stack.process_ids import end_process

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

MODEL = 'twinkle/tiny-streamed'
DATASET = 'org/chats'
ROWS, TOO_LONG = 29, 3
"""Number of rows on the hub, and of those that the program's filter removes."""
STEPS = 12
"""Steps of two epochs with batches of 4, which leave out the last 2 rows of each epoch."""
KILLED_AT = 8
"""Step after which services and program are killed, in the second epoch."""


def _silent(service: str, event: str) -> None:
    del service, event


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[FakeHub]:
    """A hub with a dataset in two files, and a base model; the services find both through the environment."""
    texts = [f'answer {index} ' + 'long ' * (10 if index % 10 == 4 else index % 3) for index in range(ROWS)]
    lines = [json.dumps({'query': f'question {index}?', 'response': text}) + '\n' for index, text in enumerate(texts)]
    with running_hub() as running:
        files = {'train-0.jsonl': ''.join(lines[:15]).encode(), 'train-1.jsonl': ''.join(lines[15:]).encode()}
        running.files[DATASET], running.is_private[DATASET] = files, False
        settings = {'HF_ENDPOINT': running.url, 'HF_TOKEN': 'hf_right', 'HF_HOME': str(tmp_path / 'hf')}
        settings['TWINKLE_MODEL_ID_ALIASES'] = f'{MODEL}={build_tiny_model(tmp_path / "model")}'
        for name, value in {**settings, 'TWINKLE_HUB_DIR': ''}.items():
            monkeypatch.setenv(name, value)
        yield running


@pytest.fixture
def folder(tmp_path: Path, hub: FakeHub) -> Iterator[Path]:
    """State folder of a running stack without a sampler."""
    folder = tmp_path / 'stack'
    options = StackOptions(state_dir=folder, base_model=MODEL, engine='torch', sampler_count=0)
    start_stack(options, report=_silent)
    yield folder
    stop_stack(folder, report=_silent)


@contextmanager
def _program(folder: Path, position: Path) -> Iterator['subprocess.Popen[str]']:
    """Run the program of a user, and kill it at the end of the block."""
    state = _state_of(folder)
    environment = {**os.environ, 'TWINKLE_SERVER_URL': state.address, 'TWINKLE_API_KEY': state.read_api_key()}
    command = [sys.executable, str(ROOT / 'tests/fixtures/streamed_user_program.py'), MODEL, f'hf://{DATASET}']
    with subprocess.Popen(
        [*command, str(position)], cwd=ROOT, env=environment, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def _state_of(folder: Path) -> StackState:
    state = StackState.load(folder)
    assert state is not None
    return state


def _permit(process: 'subprocess.Popen[str]') -> None:
    """Let the program run one more step."""
    assert process.stdin is not None
    process.stdin.write('\n')
    process.stdin.flush()


def _steps(process: 'subprocess.Popen[str]') -> list[str]:
    """Run the program to its end, and return the lines that it prints."""
    output, _ = process.communicate()
    assert process.returncode == 0
    return output.splitlines()


def _kill_data_service(folder: Path) -> int:
    """Kill the data service, and return its process id."""
    (data,) = (service for service in _state_of(folder).services if service.name == 'data')
    os.kill(data.pid, signal.SIGKILL)
    assert end_process(data.pid, data.start_mark, grace_seconds=20)
    return data.pid


def _weights(client: TwinkleClient, position: Path, folder: Path) -> dict[str, Any]:
    """Return the weights of the last checkpoint, as bytes."""
    client.download_checkpoint(json.loads(position.read_text())['checkpoint'], folder)
    return {name: value.tobytes() for name, value in load_file(folder / 'adapter_model.safetensors').items()}


def test_a_run_on_a_streamed_dataset_resumes_bitwise_after_kills(folder: Path, hub: FakeHub, tmp_path: Path) -> None:
    """A killed program, whose data service was killed too, resumes in the second epoch with equal weights."""
    whole, resumed = tmp_path / 'whole.json', tmp_path / 'resumed.json'
    with _program(folder, whole) as process:
        assert _steps(process) == [f'step {number}' for number in range(1, STEPS + 1)]
    with _program(folder, resumed) as process:
        assert process.stdout is not None
        for number in range(1, KILLED_AT + 1):
            _permit(process)
            assert process.stdout.readline() == f'step {number}\n'
        killed = _kill_data_service(folder)
        # The program waits for the data service in the next step, and dies there.
        _permit(process)
        os.kill(process.pid, signal.SIGKILL)
    revived = revive_stack(folder, report=_silent)
    assert revived is not None
    assert all(service.pid != killed for service in revived.services)
    hub.reads.clear()
    with _program(folder, resumed) as process:
        assert _steps(process) == [f'step {number}' for number in range(KILLED_AT + 1, STEPS + 1)]
    assert {'train-0.jsonl', 'train-1.jsonl'} <= set(hub.reads)
    state = _state_of(folder)
    with TwinkleClient(state.address, state.read_api_key()) as client:
        weights = [_weights(client, position, tmp_path / position.stem) for position in (whole, resumed)]
    assert weights[0] == weights[1]
    assert json.loads(whole.read_text())['loader'] == json.loads(resumed.read_text())['loader']
    assert tracebacks(folder) == []
