"""What is written down about a stack, and what is read off its processes."""

import fcntl
import os
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from twinkle_client.cli import app
from twinkle_client.cli.planning import warn_of_memory
from twinkle_client.stack import (
    ServiceState,
    StackBusyError,
    StackError,
    StackOptions,
    StackState,
    leave_stack,
    revive_stack,
    start_stack,
    stop_stack,
)
from twinkle_client.stack.processes import start_mark

runner = CliRunner()


def test_a_gateway_that_has_not_come_up_is_no_stack(tmp_path: Path) -> None:
    """What a killed start left is started anew, not taken for a running stack."""
    assert not _stack(tmp_path, _service('gateway', address='')).is_reachable()
    assert _stack(tmp_path, _service('gateway')).is_reachable()


def test_only_services_that_came_up_and_are_to_stay_are_started_again(tmp_path: Path) -> None:
    """One that somebody still waits for, or that was asked to leave, is nobody else's to start."""
    ended = _service('sampler', is_alive=False)
    waited_for = replace(_service('sampler-2', is_alive=False), address='')
    leaving = replace(_service('sampler-3', is_alive=False), is_leaving=True)
    stack = _stack(tmp_path, ended, waited_for, leaving, _service('gateway'))
    assert stack.ended() == (ended,)
    assert stack.without([ended]).is_running()


def test_a_service_that_leaves_is_written_down_until_it_has_left(tmp_path: Path) -> None:
    """It can still be stopped, is not started again, and may stay after all."""
    _stack(tmp_path, _service('sampler'), _service('gateway', address='127.0.0.1:2')).save()
    assert leave_stack(tmp_path, '127.0.0.1:1')
    assert _leaving(tmp_path) == ['sampler']
    assert leave_stack(tmp_path, '127.0.0.1:1', is_leaving=False)
    assert _leaving(tmp_path) == []
    assert not leave_stack(tmp_path, '127.0.0.1:3')
    assert not leave_stack(tmp_path / 'missing', '127.0.0.1:1')


def test_a_short_change_by_others_is_waited_for(tmp_path: Path) -> None:
    """Stopping does not fail because somebody notes something down just then."""
    with (tmp_path / 'lock').open('w') as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        stopping = pool.submit(stop_stack, tmp_path, report=_silent)
        with pytest.raises(TimeoutError):
            stopping.result(timeout=0.2)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert not stopping.result(timeout=10)


def test_a_folder_of_others_keeps_its_mode(tmp_path: Path) -> None:
    """Only a folder that is the stack's own is closed to others; its rooms are closed in any case."""
    for name in ('own', 'shared'):
        (tmp_path / name).mkdir()
        (tmp_path / name).chmod(0o755)
    (tmp_path / 'own' / 'api_key').touch()
    (tmp_path / 'shared' / 'work.txt').touch()
    for name, mode in (('own', 0o700), ('shared', 0o755)):
        _try_to_start(tmp_path / name)
        assert (tmp_path / name).stat().st_mode & 0o777 == mode
        assert (tmp_path / name / 'logs').stat().st_mode & 0o777 == 0o700


@pytest.mark.parametrize('field', ['listen', 'http_listen'])
def test_an_address_that_cannot_be_used_is_told_before_anything_starts(field: str, tmp_path: Path) -> None:
    """Nobody waits for a model to be loaded only to hear that a port is taken, or that there is none."""
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        for address in (f'127.0.0.1:{taken.getsockname()[1]}', '127.0.0.1:x', '8000'):
            options = replace(StackOptions(state_dir=tmp_path), **{field: address})
            with pytest.raises(StackError):
                start_stack(options, report=_never)


def test_memory_is_read_without_ps() -> None:
    """Small images lack the program."""
    code = 'import os; from twinkle_client.stack.processes import resident_bytes; print(resident_bytes(os.getpid()))'
    environment = {**os.environ, 'PATH': ''}
    result = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) > 1 << 20


def test_another_model_than_the_one_that_is_up_is_refused(tmp_path: Path) -> None:
    """Nobody is told of a model as if it were the one asked for."""
    _stack(tmp_path, _service('gateway')).save()
    for arguments, status in (([], 0), (['--model', 'tiny'], 0), (['--model', 'other'], 1)):
        assert runner.invoke(app, ['up', *arguments, '--state-dir', str(tmp_path)]).exit_code == status


def test_several_base_models_are_told_by_options_file_and_state(tmp_path: Path) -> None:
    """In their order; one that comes twice, or patches that could be of any of them, are refused."""
    path = tmp_path / 'stack.yaml'
    path.write_text('base_model: tiny\nmore_models: [other]\n')
    options = StackOptions(state_dir=tmp_path).with_file(path)
    assert options.base_models == ('tiny', 'other')
    StackState.create(tmp_path, base_model='tiny', more_models=('other',), services=(_service('gateway'),)).save()
    state = StackState.load(tmp_path)
    assert state is not None
    assert state.base_models == ('tiny', 'other')
    for text in ('more_models: other', 'more_models: [1]', 'base_model: a\nmore_models: [a]'):
        path.write_text(text)
        with pytest.raises(ValueError, match='more_models'):
            StackOptions(state_dir=tmp_path).with_file(path)
    path.write_text('more_models: [a]\npatches: {First: {}}\n')
    with pytest.raises(ValueError, match='patches'):
        StackOptions(state_dir=tmp_path).with_file(path)


def test_stack_of_several_base_models_is_up_for_these_alone(tmp_path: Path) -> None:
    """Nobody is told of it as if it were one of fewer, or of others."""
    StackState.create(tmp_path, base_model='tiny', more_models=('other',), services=(_service('gateway'),)).save()
    for names, status in ((['tiny', 'other'], 0), (['tiny'], 1), (['other', 'tiny'], 1)):
        arguments = [part for name in names for part in ('--model', name)]
        assert runner.invoke(app, ['up', *arguments, '--state-dir', str(tmp_path)]).exit_code == status


def test_weights_that_do_not_fit_into_memory_are_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """All copies together, of what is on the disk."""
    folder = tmp_path / 'model'
    folder.mkdir()
    (folder / 'model.safetensors').write_bytes(b'small')
    warn_of_memory([folder], copies=2)
    assert capsys.readouterr().out == ''
    with (folder / 'model.safetensors').open('wb') as file:
        file.truncate(1 << 42)
    warn_of_memory([folder, folder], copies=2)
    assert '16384.00 GiB' in capsys.readouterr().out


def test_a_model_in_a_folder_here_is_found_from_everywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The services run in another folder: they are told the whole path."""
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'config.json').touch()
    state = tmp_path / 'state'
    state.mkdir()
    StackState.create(state, base_model=str(tmp_path / 'model'), services=(_service('gateway'),)).save()
    monkeypatch.chdir(tmp_path)
    for name in ('model', './model'):
        assert runner.invoke(app, ['up', '--model', name, '--state-dir', str(state)]).exit_code == 0


@pytest.mark.parametrize('word', [['add'], ['drain', 'rp-1']])
def test_a_fleet_s_folder_may_stand_before_the_word(word: list[str], tmp_path: Path) -> None:
    """An option is never taken and forgotten."""
    result = runner.invoke(app, ['fleet', '--state-dir', str(tmp_path / 'named'), *word])
    assert result.exit_code == 1
    assert str(tmp_path / 'named') in result.output


def test_what_ended_for_good_is_forgotten(tmp_path: Path) -> None:
    """A stack whose leavers have left is whole."""
    left = replace(_service('sampler', is_alive=False), is_leaving=True)
    _stack(tmp_path, left, _service('gateway')).save()
    stack = revive_stack(tmp_path, report=_silent)
    assert stack is not None
    assert stack.is_running()


def _service(name: str, *, address: str = '127.0.0.1:1', is_alive: bool = True) -> ServiceState:
    """Return a service whose process is this one, or none."""
    mark = start_mark(os.getpid()) if is_alive else 'gone'
    return ServiceState(name=name, pid=os.getpid(), start_mark=mark, address=address, log_path='')


def _stack(folder: Path, *services: ServiceState) -> StackState:
    return StackState.create(folder, base_model='tiny', services=services)


def _leaving(folder: Path) -> list[str]:
    state = StackState.load(folder)
    return [service.name for service in state.services if service.is_leaving] if state else []


def _try_to_start(folder: Path) -> None:
    with (folder / 'lock').open('w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StackBusyError):
            start_stack(StackOptions(state_dir=folder), report=_silent)


def _silent(service: str, event: str) -> None:
    del service, event


def _never(service: str, event: str) -> None:
    raise AssertionError(f'{service} is {event}')
