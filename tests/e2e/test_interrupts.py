"""Commands that start services stop them when they are interrupted or terminated."""

import signal
import subprocess
import sys
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
        (['twinkle_client.cli', 'up'], 'Ctrl-C'),
    ],
    ids=['quickstart', 'up'],
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
        # A test that fails must not wait for a command that ignores signals.
        process.kill()
        process.communicate()
    assert 'Traceback' not in output
    assert [service.name for service in state.services if service.is_running()] == []
    assert StackState.load(tmp_path / 'state') is None
