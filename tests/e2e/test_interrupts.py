"""Commands that start services also stop them when the commands are interrupted or terminated."""

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle_client.stack import StackState

pytestmark = pytest.mark.timeout(180)


@pytest.mark.parametrize(
    ('command', 'marker'),
    [
        pytest.param(['examples.quickstart', '--steps', '1000000'], '3. Training', marks=pytest.mark.slow),
        (['twinkle_client.cli', 'up', '--engine', 'torch'], 'Ctrl-C'),
        pytest.param(['twinkle_client.cli', 'up', '--engine', 'vllm'], 'Ctrl-C', marks=pytest.mark.slow),
    ],
    ids=['quickstart', 'up with torch', 'up with vLLM'],
)
@pytest.mark.parametrize(
    'signal_number',
    [
        signal.SIGINT,
        pytest.param(signal.SIGTERM, marks=pytest.mark.slow),
        pytest.param(signal.SIGHUP, marks=pytest.mark.slow),
    ],
)
def test_interrupt_stops_every_process(
    command: list[str], marker: str, signal_number: signal.Signals, tmp_path: Path
) -> None:
    """A signal stops all services, and no stack is recorded as running."""
    model = build_tiny_model(tmp_path / 'model')
    arguments = [sys.executable, '-u', '-m', *command, '--model', str(model), '--state-dir', str(tmp_path / 'state')]
    process = subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if marker in line:
                break
        state = StackState.load(tmp_path / 'state')
        assert state is not None
        assert state.is_running()
        process.send_signal(signal_number)
        output = process.stdout.read()
        process.wait()
    finally:
        # A failing test must not wait for a command that ignores signals.
        process.kill()
        process.communicate()
    assert 'Traceback' not in output
    assert [service.name for service in state.services if service.is_running()] == []
    assert StackState.load(tmp_path / 'state') is None


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_exits_of_one_service_never_stop_the_others(tmp_path: Path) -> None:
    """A service that is killed repeatedly is restarted each time, and the other services keep running."""
    model = build_tiny_model(tmp_path / 'model')
    options = ['--model', str(model), '--engine', 'torch', '--state-dir', str(tmp_path / 'state')]
    with (tmp_path / 'up.log').open('wb') as log:
        command = [sys.executable, '-u', '-m', 'twinkle_client.cli', 'up', *options]
        process = subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log)
    try:
        while 'Ctrl-C' not in (tmp_path / 'up.log').read_text():
            _pause_while_running(process)
        pids = [_wait_for_service(process, tmp_path / 'state', 'data', unlike=None)]
        others = _pids(tmp_path / 'state')
        for _ in range(6):
            os.kill(pids[-1], signal.SIGKILL)
            pids.append(_wait_for_service(process, tmp_path / 'state', 'data', unlike=pids[-1]))
        assert process.poll() is None
        assert {**_pids(tmp_path / 'state'), 'data': 0} == {**others, 'data': 0}
        process.send_signal(signal.SIGINT)
        process.wait()
    finally:
        process.kill()
        process.wait()
    assert 'End of ' in (tmp_path / 'up.log').read_text()


def _pids(folder: Path) -> dict[str, int]:
    state = StackState.load(folder)
    return {service.name: service.pid for service in state.services} if state is not None else {}


def _pause_while_running(process: subprocess.Popen[bytes]) -> None:
    with suppress(subprocess.TimeoutExpired):
        pytest.fail(f'the command exited with {process.wait(timeout=0.2)}')


def _wait_for_service(process: subprocess.Popen[bytes], folder: Path, name: str, *, unlike: int | None) -> int:
    """Wait until the stack runs and the service has a process other than `unlike`; return the process id."""
    while True:
        state = StackState.load(folder)
        if state is not None and state.is_running() and (pid := _pids(folder).get(name)) not in {None, unlike}:
            assert pid is not None
            return pid
        _pause_while_running(process)
