"""Tests of `twinkle logs`: selected processes, last lines, and lines that are added while a log is followed."""

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle_client.cli import app

runner = CliRunner()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The state folder of a stopped stack, with logs of three processes."""
    (tmp_path / 'logs').mkdir()
    for name in ('gateway', 'sampler', 'sampler-2'):
        (tmp_path / 'logs' / f'{name}.log').write_text(''.join(f'{name} {number}\n' for number in range(30)))
    return tmp_path


def _logs(folder: Path, *arguments: str) -> list[str]:
    result = runner.invoke(app, ['logs', *arguments, '--state-dir', str(folder)])
    assert result.exit_code == 0
    return result.output.splitlines()


def test_last_lines_of_all_processes_have_their_names(folder: Path) -> None:
    """If no process is named, the last lines of each process are printed with the process's name."""
    names = ['gateway', 'sampler', 'sampler-2']
    assert _logs(folder, '-n', '2') == [f'{name:<9} | {name} {number}' for name in names for number in (28, 29)]


def test_lines_of_one_process_have_no_prefix(folder: Path) -> None:
    """The lines of a single process have no prefix, and by default its last 20 lines are printed."""
    assert _logs(folder, 'gateway') == [f'gateway {number}' for number in range(10, 30)]


def test_service_selects_all_its_processes(folder: Path) -> None:
    """The name of a service selects all its processes, and the name of a process selects this process."""
    assert len(_logs(folder, 'sampler', '-n', '1')) == 2
    assert _logs(folder, 'sampler-2', '-n', '1') == ['sampler-2 29']


def test_error_for_an_unknown_name_lists_the_processes(folder: Path) -> None:
    """The error for an unknown name lists the processes."""
    result = runner.invoke(app, ['logs', 'modle', '--state-dir', str(folder)])
    assert result.exit_code == 1
    assert "no service 'modle'; it has gateway, sampler, sampler-2" in ' '.join(result.output.split())


@pytest.fixture
def followed(folder: Path) -> Iterator[subprocess.Popen[str]]:
    """`twinkle logs gateway --follow` after its first line, which is the last line of the file."""
    command = [sys.executable, '-m', 'twinkle_client.cli', 'logs', 'gateway', '-fn', '1', '--state-dir', str(folder)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert process.stdout.readline() == 'gateway 29\n'
    yield process
    process.kill()
    process.communicate()


def test_followed_log_continues_after_it_was_emptied(folder: Path, followed: subprocess.Popen[str]) -> None:
    """New lines are printed once they are complete, even after the file was emptied; Ctrl-C ends the command."""
    assert followed.stdout is not None
    path = folder / 'logs' / 'gateway.log'
    with path.open('a') as file:
        file.write('half ')
        file.flush()
        file.write('line\n')
    assert followed.stdout.readline() == 'half line\n'
    os.truncate(path, 0)
    with path.open('a') as file:
        file.write('new\n')
    assert followed.stdout.readline() == 'new\n'
    followed.send_signal(signal.SIGINT)
    _, errors = followed.communicate(timeout=60)
    assert (followed.returncode, errors.strip()) == (130, 'twinkle: interrupted; the services continue')
