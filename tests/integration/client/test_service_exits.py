"""Tests of messages about services that exit while a stack starts."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from twinkle_client.stack.hosts import StackError, children
from twinkle_client.stack.process_ids import end_process
from twinkle_client.stack.spawning import Spawner


@pytest.fixture
def spawner(tmp_path: Path) -> Iterator[Spawner]:
    """A spawner whose processes are stopped at the end."""
    spawner = Spawner(tmp_path, lambda *_: None)
    yield spawner
    _end(spawner)


def start(spawner: Spawner, name: str, folder: Path, **settings: str) -> None:
    """Start a service on a free port."""
    addresses = {'listen': '127.0.0.1:0', 'address_file': str(spawner.address_file(name))}
    spawner.configure(name, {'state_dir': str(folder / name), **addresses, **settings})
    spawner.spawn(name)


def test_killed_service_is_reported_with_its_signal(spawner: Spawner, tmp_path: Path) -> None:
    """A service that is killed during its start is reported with the signal and its likely cause."""
    start(spawner, 'data', tmp_path)
    os.kill(spawner.state_of('data').pid, signal.SIGKILL)
    with pytest.raises(StackError, match=r'^data was killed by SIGKILL \(the host may have too little memory\)'):
        spawner.wait_for('data')


def test_killed_service_is_started_again_within_the_limit(tmp_path: Path) -> None:
    """A killed service is restarted, at the same address if it was ready, until the limit of restarts."""
    restarts: list[str] = []
    limited = Spawner(tmp_path, lambda *_: None, restart_limit=2, on_restart=lambda: restarts.append('restart'))
    try:
        start(limited, 'data', tmp_path)
        _kill(limited, 'data')
        address = limited.wait_for('data')
        start(limited, 'checkpoint', tmp_path)
        _kill(limited, 'data')
        limited.wait_for('checkpoint')
        limited.check_running()
        assert (len(restarts), limited.wait_for('data')) == (2, address)
        _kill(limited, 'data')
        with pytest.raises(StackError, match=r'^data was killed by SIGKILL'):
            limited.check_running()
    finally:
        _end(limited)


def _kill(spawner: Spawner, name: str) -> None:
    pid = spawner.state_of(name).pid
    os.kill(pid, signal.SIGKILL)
    next(child for child in children if child.pid == pid).wait(30)


def _end(spawner: Spawner) -> None:
    for state in map(spawner.state_of, spawner.started):
        end_process(state.pid, state.start_mark, grace_seconds=5)
    for child in children:
        child.wait()


def test_exit_of_any_service_is_reported_with_its_log(spawner: Spawner, tmp_path: Path) -> None:
    """A service that exits while another service starts is reported with the last lines of its log."""
    start(spawner, 'data', tmp_path)
    spawner.wait_for('data')
    start(spawner, 'checkpoint', tmp_path, listen='nowhere')
    # Without its address file, `data` never becomes ready, so only the exit of `checkpoint` ends the wait.
    spawner.address_file('data').unlink()
    with pytest.raises(StackError, match=r'(?s)^checkpoint exited with status 1; its log ends with:\n.*listen'):
        spawner.wait_for('data')
