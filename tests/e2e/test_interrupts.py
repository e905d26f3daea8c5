"""Whoever starts the services stops them, also when interrupted or told to end."""

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
    ('command', 'sign'),
    [
        (['examples.quickstart', '--steps', '1000000'], '3. Training'),
        (['twinkle_client.cli', 'up'], 'Ctrl-C'),
    ],
    ids=['quickstart', 'up'],
)
@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_interrupt_stops_every_process(command: list[str], sign: str, number: signal.Signals, tmp_path: Path) -> None:
    """After the signal no service is left and nothing is written down as running."""
    model = build_tiny_model(tmp_path / 'model')
    arguments = [sys.executable, '-u', '-m', *command, '--model', str(model), '--state-dir', str(tmp_path / 'state')]
    with subprocess.Popen(arguments, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if sign in line:
                break
        state = StackState.load(tmp_path / 'state')
        assert state is not None
        assert state.is_running()
        process.send_signal(number)
        output = process.stdout.read()
    assert 'Traceback' not in output
    assert [service.name for service in state.services if service.is_running()] == []
    assert StackState.load(tmp_path / 'state') is None
