"""Starts the five services, each as a process of its own, and stops them again."""

import fcntl
import json
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

import yaml

from twinkle_client.stack.options import SERVICES, StackOptions
from twinkle_client.stack.processes import end_process, start_mark
from twinkle_client.stack.state import ServiceState, StackState, key_path, read_secret

_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15
STOP_GRACE_SECONDS = 20.0
START_LIMIT_SECONDS = 600.0
"""The model may have to be read from a slow disk."""


_children: list[subprocess.Popen[bytes]] = []
"""Services this program started. They may outlive every other reference to them, which is meant."""


class StackError(Exception):
    """The stack could not be started; the message says why."""


class StackBusyError(StackError):
    """Another program starts or stops services in this state folder."""


class Report(Protocol):
    """Told how the start goes."""

    def __call__(self, service: str, event: str) -> None:
        """Say that `service` is 'starting', 'ready', 'ended', 'stopping' or 'stopped'."""
        ...


def start_stack(options: StackOptions, *, report: Report) -> StackState:
    """Start what does not run yet and return the running stack.

    A stack that runs already in this state folder is returned as it is; what is left of one that
    broke is stopped first. When starting fails, everything that was started is stopped.

    Raises:
        StackError: a service did not come up; the end of its log is in the message.
    """
    _make_private(options.state_dir)
    with _locked(options.state_dir):
        state = StackState.load(options.state_dir)
        if state is not None and state.is_running():
            return state
        if state is not None:
            _stop(state, report=report)
        launch = _Launch(options, report)
        try:
            return launch.run()
        except BaseException:
            _stop(launch.state, report=report)
            raise


def revive_stack(state_dir: Path, *, report: Report) -> StackState | None:
    """Start again what ended of a stack that was up, each service as it was and where it was.

    Returns:
        The stack; None where it was stopped.

    Raises:
        StackBusyError: it is just being started or stopped.
        StackError: a service does not come up again; the end of its log is in the message.
    """
    with _locked(state_dir):
        state = StackState.load(state_dir)
        if state is None or state.is_running() or not state.address:
            return state
        launch = _Launch(StackOptions(state_dir=state_dir, base_model=state.base_model), report)
        return launch.revive(state)


def stop_stack(state_dir: Path, *, report: Report) -> bool:
    """Stop a stack, last service first; return whether there was one."""
    if not state_dir.is_dir():
        return False
    with _locked(state_dir):
        state = StackState.load(state_dir)
        if state is None:
            return False
        _stop(state, report=report)
        return True


class _Launch:
    """One start; `state` is what has been started so far."""

    def __init__(self, options: StackOptions, report: Report) -> None:
        self._options = options
        self._folder = options.state_dir
        self._report = report
        self._token = secrets.token_urlsafe(32)
        self._addresses: dict[str, str] = {}
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.state = StackState.create(self._folder, base_model=options.base_model, services=())

    def run(self) -> StackState:
        self._start('checkpoint', {})
        self._start('data', {'base_models': [self._options.base_model]})
        self._wait_for('checkpoint')
        checkpoint = self._addresses['checkpoint']
        engine = {'base_model': self._options.base_model, 'checkpoint_address': checkpoint}
        # What is trained is what is sampled only where both load the same model.
        patches = {'patches': dict(self._options.patches)} if self._options.patches else {}
        self._start('model', {**engine, **patches, 'thread_count': _trainer_threads()})
        self._start('sampler', {**engine, 'torch': patches} if patches else engine)
        for name in ('data', 'model', 'sampler'):
            self._wait_for(name)
        self._start(
            'gateway',
            {'listen': self._options.listen, 'upstreams': dict(self._addresses), 'bootstrap_key': self._api_key()},
        )
        self._wait_for('gateway')
        self.state = StackState.create(
            self._folder,
            base_model=self._options.base_model,
            services=tuple(self._service_state(name) for name in SERVICES),
        )
        self.state.save()
        return self.state

    def revive(self, state: StackState) -> StackState:
        """Start what ended of `state`; see `revive_stack`."""
        self.state = state
        for service in state.services:
            if service.is_running():
                continue
            self._report(service.name, 'ended')
            self._spawn(service.name, listen=service.address)
            self._addresses[service.name] = service.address
            again = self._service_state(service.name)
            services = tuple(again if item.name == service.name else item for item in self.state.services)
            self.state = StackState.create(self._folder, base_model=state.base_model, services=services)
            self.state.save()
        for name in list(self._processes):
            self._wait_for(name)
        return self.state

    def _start(self, name: str, settings: Mapping[str, Any]) -> None:
        # Not sorted: patches are applied in their order.
        _write_private(self._config_path(name), yaml.safe_dump(self._settings(name, settings), sort_keys=False))
        self._spawn(name)
        # Written down at once, so that a start that is killed leaves nothing that cannot be found.
        services = tuple(self._service_state(started) for started in self._processes)
        self.state = StackState.create(self._folder, base_model=self._options.base_model, services=services)
        self.state.save()

    def _spawn(self, name: str, *, listen: str = '') -> None:
        """Start a process; `listen` is where, if not where its configuration says."""
        self._report(name, 'starting')
        self._address_file(name).unlink(missing_ok=True)
        command = [sys.executable, '-m', f'services.{name}', '--config', str(self._config_path(name))]
        with self._log_path(name).open('ab') as log:
            self._processes[name] = subprocess.Popen(
                [*command, *(['--set', f'listen={listen}'] if listen else [])],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self._folder,
                # An interrupt of the terminal is for us alone: services are stopped in their order.
                start_new_session=True,
            )
        _children.append(self._processes[name])

    def _settings(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(self._options.services.get(name, {}))
        telemetry = {'trace_dir': str(self._folder / 'traces'), **own.pop('telemetry', {})}
        if 'torch' in settings and 'torch' in own:
            own['torch'] = {**settings['torch'], **own['torch']}
        return {
            'listen': '127.0.0.1:0',
            'state_dir': str(self._folder / 'data' / name),
            'address_file': str(self._address_file(name)),
            'internal_token': self._token,
            'telemetry': telemetry,
            **settings,
            **own,
        }

    def _wait_for(self, name: str) -> None:
        process, path = self._processes[name], self._address_file(name)
        end = time.monotonic() + START_LIMIT_SECONDS
        while not path.exists():
            if process.poll() is not None:
                raise StackError(f'{name} ended with status {process.returncode}:\n{self._log_tail(name)}')
            if time.monotonic() > end:
                raise StackError(f'{name} did not serve within {START_LIMIT_SECONDS:.0f} s:\n{self._log_tail(name)}')
            time.sleep(_POLL_SECONDS)
        self._addresses[name] = json.loads(path.read_text(encoding='utf-8'))['address']
        self._report(name, 'ready')

    def _service_state(self, name: str) -> ServiceState:
        pid = self._processes[name].pid
        return ServiceState(
            name=name,
            pid=pid,
            start_mark=start_mark(pid),
            address=self._addresses.get(name, ''),
            log_path=str(self._log_path(name)),
        )

    def _api_key(self) -> str:
        path = key_path(self._folder)
        key = read_secret(path)
        if not key:
            key = f'tml-{secrets.token_urlsafe(32)}'
            _write_private(path, f'{key}\n')
        return key

    def _address_file(self, name: str) -> Path:
        return self._folder / 'run' / f'{name}.json'

    def _config_path(self, name: str) -> Path:
        return self._folder / 'config' / f'{name}.yaml'

    def _log_path(self, name: str) -> Path:
        path = self._folder / 'logs' / f'{name}.log'
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _log_tail(self, name: str) -> str:
        lines = self._log_path(name).read_text(encoding='utf-8', errors='replace').splitlines()
        return '\n'.join(f'  {name} | {line}' for line in lines[-_LOG_TAIL_LINES:])


def _trainer_threads() -> int:
    """Half the cores: threads that wait for one another crawl where something else needs a core, too."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, cores // 2)


def _stop(state: StackState, *, report: Report) -> None:
    """Stop what is written down, last service first."""
    for service in reversed(state.services):
        if service.is_running():
            report(service.name, 'stopping')
            end_process(service.pid, service.start_mark, grace_seconds=STOP_GRACE_SECONDS)
            report(service.name, 'stopped')
    state.delete()
    _children[:] = [child for child in _children if child.poll() is None]


def _make_private(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    folder.chmod(0o700)


def _write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, 'w', encoding='utf-8') as file:
        file.write(text)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Let one process at a time start or stop the stack of a folder."""
    with (folder / 'lock').open('w') as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise StackBusyError(f'another `twinkle up` or `twinkle down` is at work in {folder}') from None
        yield
