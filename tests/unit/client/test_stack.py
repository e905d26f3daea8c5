"""Tests of a stack's options, its stored state, and the state of its processes."""

import fcntl
import json
import os
import signal
import socket
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import BaseModel, ConfigDict
from typer.testing import CliRunner

from twinkle_client.cli import app
from twinkle_client.cli.planning import warn_of_memory
from twinkle_client.stack import (
    SERVICES,
    ServiceState,
    StackBusyError,
    StackError,
    StackOptions,
    StackState,
    revive_stack,
    start_stack,
    stop_stack,
)
from twinkle_client.stack.hosts import Command, start_child
from twinkle_client.stack.process_ids import start_mark
from twinkle_client.stack.sections import problems_of
from twinkle_client.stack.spawning import with_port
from twinkle_client.stack.startup import dtype_of, threads_of_each

runner = CliRunner()


@pytest.mark.parametrize('layers', [['linear_attention', 'full_attention'], ['full_attention']])
def test_models_that_vllm_cannot_run_get_the_torch_engine(tmp_path: Path, layers: list[str]) -> None:
    """Models with linear attention use vLLM only if torchvision is installed; a chosen engine is never replaced."""
    (tmp_path / 'config.json').write_text(json.dumps({'text_config': {'layer_types': layers}}))
    is_usable = find_spec('vllm') and (find_spec('torchvision') or 'linear_attention' not in layers)
    options = StackOptions(state_dir=tmp_path, base_model=str(tmp_path))
    assert options.engine_of(str(tmp_path)) == ('vllm' if is_usable else 'torch')
    assert replace(options, engine='vllm').engine_of(str(tmp_path)) == 'vllm'


@pytest.mark.parametrize('content', [None, b'{', b'[]', b'{"text_config": 5}', b'{"layer_types": null}'])
def test_unusable_folder_does_not_change_the_engine(tmp_path: Path, content: bytes | None) -> None:
    """A model folder without a usable configuration uses the default engine."""
    if content is not None:
        (tmp_path / 'config.json').write_bytes(content)
    options = StackOptions(state_dir=tmp_path, base_model=str(tmp_path))
    assert options.engine_of(str(tmp_path)) == options.engine_of('org/name')


def test_stack_is_reachable_once_its_gateway_has_an_address(tmp_path: Path) -> None:
    """A stack whose gateway has no address yet is not reachable."""
    assert not _stack(tmp_path, _service('gateway', address='')).is_reachable()
    assert _stack(tmp_path, _service('gateway')).is_reachable()


def test_only_exited_services_are_restarted(tmp_path: Path) -> None:
    """A service that is still starting, or is marked as leaving, is not restarted."""
    exited = _service('sampler', is_alive=False)
    starting = replace(_service('sampler-2', is_alive=False), address='')
    leaving = replace(_service('sampler-3', is_alive=False), is_leaving=True)
    stack = _stack(tmp_path, exited, starting, leaving, _service('gateway'))
    assert stack.ended() == (exited,)
    assert stack.without([exited]).is_running()


def test_stopping_waits_for_the_lock_of_the_state(tmp_path: Path) -> None:
    """Stopping waits while another process holds the lock of the state."""
    with (tmp_path / 'lock').open('w') as file, ThreadPoolExecutor(1) as pool:
        fcntl.flock(file, fcntl.LOCK_EX)
        stopping = pool.submit(stop_stack, tmp_path, report=_silent)
        with pytest.raises(TimeoutError):
            stopping.result(timeout=0.2)
        fcntl.flock(file, fcntl.LOCK_UN)
        assert not stopping.result(timeout=10)


@pytest.mark.parametrize('number', [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_more_interrupts_do_not_leave_services_running(tmp_path: Path, number: signal.Signals) -> None:
    """A signal that arrives while services are being stopped takes effect after all of them have stopped."""
    program = [sys.executable, '-c', 'import signal; signal.pause()']
    processes = [subprocess.Popen(program) for _ in range(3)]
    services = [
        ServiceState(name=name, pid=process.pid, start_mark=start_mark(process.pid), address='127.0.0.1:1', log_path='')
        for name, process in zip(('data', 'model', 'gateway'), processes, strict=True)
    ]
    _stack(tmp_path, *services).save()
    stopped: list[str] = []

    def interrupt(service: str, event: str) -> None:
        stopped.extend([service] if event == 'stopped' else [])
        signal.raise_signal(number)

    def fail(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    earlier = signal.signal(number, fail)
    try:
        with pytest.raises(KeyboardInterrupt):
            stop_stack(tmp_path, report=interrupt)
    finally:
        signal.signal(number, earlier)
    assert stopped == ['gateway', 'model', 'data']
    assert all(process.wait() == -signal.SIGTERM for process in processes)
    assert StackState.load(tmp_path) is None


@pytest.mark.slow
def test_shared_folder_keeps_its_mode(tmp_path: Path) -> None:
    """A folder becomes private only if it belongs to the stack; its subfolder `logs` is always private."""
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
def test_unusable_address_is_refused_before_the_start(field: str, tmp_path: Path) -> None:
    """A listen address that is taken, malformed or incomplete is refused before any service starts."""
    with socket.socket() as taken:
        taken.bind(('127.0.0.1', 0))
        taken.listen()
        for address in (f'127.0.0.1:{taken.getsockname()[1]}', '127.0.0.1:x', '8000'):
            options = replace(StackOptions(state_dir=tmp_path), **{field: address})
            with pytest.raises(StackError):
                start_stack(options, report=_fail_on_report)


def test_chosen_port_is_not_used_by_outgoing_connections() -> None:
    """An outgoing connection cannot take a port that is chosen before its process listens."""
    ports = {int(with_port('127.0.0.1:0').rpartition(':')[2]) for _ in range(20)}
    assert len(ports) > 10
    assert max(ports) < 32_000


def test_start_with_too_little_free_space_is_refused(tmp_path: Path) -> None:
    """A stack is refused before any service starts, and leaves no record, if its disk has too little free space."""
    with pytest.raises(StackError, match='MiB of free space, and a stack needs at least'):
        start_stack(StackOptions(state_dir=tmp_path, min_free_bytes=1 << 60), report=_fail_on_report)
    assert StackState.load(tmp_path) is None


@pytest.mark.parametrize('service', SERVICES)
@pytest.mark.parametrize(
    ('section', 'message'),
    [
        ({'drain_secnds': 3}, 'drain_secnds: unknown field; did you mean drain_seconds'),
        ({'limits': {'queue_lenght': 3}}, 'limits.queue_lenght: unknown field; did you mean queue_length'),
        ({'zzzz': 3}, 'zzzz: unknown field; known fields are .*listen'),
        ({'drain_seconds': -1}, 'drain_seconds: '),
    ],
)
def test_wrong_field_of_a_section_is_refused_before_the_start(
    service: str, section: dict[str, object], message: str, tmp_path: Path
) -> None:
    """The error for an unknown or invalid field of any service has its path and similar names; nothing is created."""
    (tmp_path / 'up.yaml').write_text(yaml.safe_dump({service: section}))
    arguments = ['up', '--config', str(tmp_path / 'up.yaml'), '--state-dir', str(tmp_path / 'state')]
    result = runner.invoke(app, arguments)
    assert result.exit_code == 1
    assert not (tmp_path / 'state').exists()
    with pytest.raises(ValueError, match=f'{service}.{message}'):
        StackOptions(state_dir=tmp_path).with_file(tmp_path / 'up.yaml')


class Inner(BaseModel):
    """A section inside a configuration."""

    model_config = ConfigDict(extra='forbid')
    size_bytes: int = 0


class Outer(BaseModel):
    """A configuration with plain, optional, listed and mapped sections."""

    model_config = ConfigDict(extra='forbid')
    plain: Inner = Inner()
    optional: Inner | None = None
    listed: list[Inner] = []
    mapped: dict[str, Inner] = {}
    both: dict[str, list[Inner] | None] = {}


@pytest.mark.parametrize(
    'section',
    [
        {'plain': {'size_byte': 1}},
        {'optional': {'size_byte': 1}},
        {'listed': [{}, {'size_byte': 1}]},
        {'mapped': {'x': {'size_byte': 1}}},
        {'both': {'x': [{'size_byte': 1}]}},
    ],
    ids=lambda section: next(iter(section)),
)
def test_fields_of_sections_in_all_forms_are_suggested(section: dict[str, object]) -> None:
    """A field of an optional, listed or mapped section is suggested like a field of a plain section."""
    (problem,) = problems_of('probe', Outer, section)
    assert problem.endswith('size_byte: unknown field; did you mean size_bytes?')


def test_right_fields_of_a_section_are_accepted(tmp_path: Path) -> None:
    """A section may omit the required fields that `twinkle up` fills in."""
    (tmp_path / 'up.yaml').write_text(yaml.safe_dump({service: {'drain_seconds': 3} for service in SERVICES}))
    assert StackOptions(state_dir=tmp_path).with_file(tmp_path / 'up.yaml').services['model'] == {'drain_seconds': 3}


@pytest.mark.parametrize('name', ['file', 'file/below'])
def test_unusable_state_folder_is_named(name: str, tmp_path: Path) -> None:
    """If a state folder cannot be created, the error names its path and the option that changes the path."""
    (tmp_path / 'file').touch()
    with pytest.raises(StackError, match=rf'{name}: .*--state-dir'):
        start_stack(StackOptions(state_dir=tmp_path / name), report=_fail_on_report)


def test_memory_is_read_without_ps() -> None:
    """The memory of a process can be read without the program `ps`."""
    code = 'import os; from twinkle_client.stack.process_ids import resident_bytes; print(resident_bytes(os.getpid()))'
    environment = {**os.environ, 'PATH': ''}
    result = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True, check=True)
    assert int(result.stdout) > 1 << 20


def test_other_model_than_the_running_one_is_refused(tmp_path: Path) -> None:
    """`twinkle up` fails if a stack with another base model is already running."""
    _stack(tmp_path, _service('gateway')).save()
    for arguments, status in (([], 0), (['--model', 'tiny'], 0), (['--model', 'other'], 1)):
        assert runner.invoke(app, ['up', *arguments, '--state-dir', str(tmp_path)]).exit_code == status


def test_several_base_models_keep_their_order(tmp_path: Path) -> None:
    """Options and state keep the order of the base models. Duplicates, and patches with several models, are refused."""
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


@pytest.mark.parametrize('text', ['trainer_count: 0', 'trainer_count: two', 'trainer_count: true'])
def test_invalid_number_of_trainers_is_refused(text: str, tmp_path: Path) -> None:
    """A number of trainers that is not a positive integer is refused."""
    (tmp_path / 'stack.yaml').write_text(text)
    with pytest.raises(ValueError, match='trainer_count must be'):
        StackOptions(state_dir=tmp_path).with_file(tmp_path / 'stack.yaml')


def test_several_base_models_must_equal_the_running_ones(tmp_path: Path) -> None:
    """`twinkle up` fails if the running stack has different base models, or the same base models in another order."""
    StackState.create(tmp_path, base_model='tiny', more_models=('other',), services=(_service('gateway'),)).save()
    for names, status in ((['tiny', 'other'], 0), (['tiny'], 1), (['other', 'tiny'], 1)):
        arguments = [part for name in names for part in ('--model', name)]
        assert runner.invoke(app, ['up', *arguments, '--state-dir', str(tmp_path)]).exit_code == status


def test_weights_that_exceed_the_memory_cause_a_warning(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A warning with the size of all copies is printed if the weights exceed the memory, and not for small weights."""
    folder = tmp_path / 'model'
    folder.mkdir()
    (folder / 'model.safetensors').write_bytes(b'small')
    warn_of_memory([folder], copies=2)
    assert capsys.readouterr().out == ''
    with (folder / 'model.safetensors').open('wb') as file:
        file.truncate(1 << 42)
    warn_of_memory([folder, folder], copies=2)
    assert '16384.00 GiB' in capsys.readouterr().out


def test_relative_model_folder_becomes_absolute(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative path to a model is stored as its absolute path, because services run in another folder."""
    (tmp_path / 'model').mkdir()
    (tmp_path / 'model' / 'config.json').touch()
    state = tmp_path / 'state'
    state.mkdir()
    StackState.create(state, base_model=str(tmp_path / 'model'), services=(_service('gateway'),)).save()
    monkeypatch.chdir(tmp_path)
    for name in ('model', './model'):
        assert runner.invoke(app, ['up', '--model', name, '--state-dir', str(state)]).exit_code == 0


@pytest.mark.parametrize('command', [['add'], ['drain', 'rp-1']])
def test_state_folder_option_before_a_fleet_command_is_used(command: list[str], tmp_path: Path) -> None:
    """The option `--state-dir` before a subcommand of `fleet` applies to the subcommand."""
    result = runner.invoke(app, ['fleet', '--state-dir', str(tmp_path / 'named'), *command])
    assert result.exit_code == 1
    assert str(tmp_path / 'named') in result.output


def test_service_that_has_left_is_removed_from_the_state(tmp_path: Path) -> None:
    """Reviving a stack removes services that are marked as leaving and have exited."""
    exited = replace(_service('sampler', is_alive=False), is_leaving=True)
    _stack(tmp_path, exited, _service('gateway')).save()
    stack = revive_stack(tmp_path, report=_silent)
    assert stack is not None
    assert stack.is_running()


def _service(name: str, *, address: str = '127.0.0.1:1', is_alive: bool = True) -> ServiceState:
    """Return a service whose process is the current process or has exited."""
    mark = start_mark(os.getpid()) if is_alive else 'gone'
    return ServiceState(name=name, pid=os.getpid(), start_mark=mark, address=address, log_path='')


def _stack(folder: Path, *services: ServiceState) -> StackState:
    return StackState.create(folder, base_model='tiny', services=services)


def _try_to_start(folder: Path) -> None:
    with (folder / 'lock').open('w') as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        with pytest.raises(StackBusyError):
            start_stack(StackOptions(state_dir=folder), report=_silent)


def _silent(service: str, event: str) -> None:
    del service, event


def _fail_on_report(service: str, event: str) -> None:
    raise AssertionError(f'{service} is {event}')


@pytest.mark.parametrize(
    ('fields', 'earlier', 'expected'),
    [
        ({}, None, 'auto'),
        ({'dtype': 'float32'}, None, 'float32'),
        ({'full_parameters': True}, None, 'float32'),
        ({'services': {'model': {'full_parameters': True}}}, None, 'float32'),
        ({'services': {'model': {'dtype': 'bfloat16'}}}, None, 'bfloat16'),
        ({}, {'dtype': 'auto'}, 'auto'),
        ({}, {'dtype': 'float32'}, 'float32'),
        ({}, {'base_model': 'm'}, 'float32'),
        ({'dtype': 'bfloat16'}, {'dtype': 'float32'}, 'bfloat16'),
    ],
)
def test_stack_keeps_the_dtype_of_its_adapters(
    tmp_path: Path, fields: dict[str, Any], earlier: dict[str, Any] | None, expected: str
) -> None:
    """A new stack selects a data type. An existing stack keeps its data type unless another one is requested."""
    assert dtype_of(StackOptions(state_dir=tmp_path, **fields), earlier=earlier) == expected


def test_unknown_dtype_is_refused(tmp_path: Path) -> None:
    """The error for an unknown dtype names the field and the possible values."""
    with pytest.raises(ValueError, match='dtype must be one of auto, float32'):
        StackOptions(state_dir=tmp_path, dtype='bf16')


def test_threads_are_a_share_of_the_cores_unless_the_user_sets_them() -> None:
    """One process gets all cores, and several divide them. OMP_NUM_THREADS, if set, applies to each process."""
    cores = len(os.sched_getaffinity(0))
    assert threads_of_each(1, {}) == cores
    assert threads_of_each(2 * cores, {'OMP_NUM_THREADS': ''}) == 1
    assert threads_of_each(3, {'OMP_NUM_THREADS': '5'}) == 5


def test_waiting_threads_of_services_sleep(tmp_path: Path) -> None:
    """Services share the cores, so each process starts with the setting for passive waiting."""
    log = tmp_path / 'log'
    program = ['-c', 'import os; print(os.environ["OMP_WAIT_POLICY"])']
    command = Command(arguments=program, log=log, folder=tmp_path, listen='127.0.0.1:0')
    assert start_child(command).wait() == 0
    assert log.read_text().strip() == os.environ.get('OMP_WAIT_POLICY', 'PASSIVE')
