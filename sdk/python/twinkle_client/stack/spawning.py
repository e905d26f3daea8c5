"""Starts service processes of one state folder: configuration in, address out."""

import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from twinkle_client.stack.processes import start_mark
from twinkle_client.stack.state import ServiceState

_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15
START_LIMIT_SECONDS = 600.0
"""The model may have to be read from a slow disk."""

children: list[subprocess.Popen[bytes]] = []
"""Services this program started. They may outlive every other reference to them, which is meant."""


class StackError(Exception):
    """The stack could not be started; the message says why."""


class Report(Protocol):
    """Told how the start goes."""

    def __call__(self, service: str, event: str) -> None:
        """Say that `service` is 'starting', 'ready', 'ended', 'stopping' or 'stopped'."""
        ...


class Spawner:
    """Starts processes, each named after its service; one more of a kind has a number behind it."""

    def __init__(self, folder: Path, report: Report) -> None:
        """Keep configurations, addresses and logs in `folder`."""
        self._folder = folder
        self._report = report
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self.addresses: dict[str, str] = {}
        """Where each serves that was waited for."""

    @property
    def started(self) -> tuple[str, ...]:
        """Names of what was started, in order."""
        return tuple(self._processes)

    def configure(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write a configuration file, readable for its owner alone."""
        # Not sorted: patches are applied in their order.
        write_private(self.config_path(name), yaml.safe_dump(dict(settings), sort_keys=False))

    def spawn(self, name: str, *, listen: str = '') -> None:
        """Start a configured process; `listen` is where, if not where its configuration says."""
        self._report(name, 'starting')
        self.address_file(name).unlink(missing_ok=True)
        command = [sys.executable, '-m', f'services.{service_of(name)}', '--config', str(self.config_path(name))]
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
        children.append(self._processes[name])

    def wait_for(self, name: str) -> str:
        """Return the address of a process once it serves.

        Raises:
            StackError: it ended, or takes too long; the end of its log is in the message.
        """
        process, path = self._processes[name], self.address_file(name)
        end = time.monotonic() + START_LIMIT_SECONDS
        while not path.exists():
            if process.poll() is not None:
                raise StackError(f'{name} ended with status {process.returncode}:\n{self._log_tail(name)}')
            if time.monotonic() > end:
                raise StackError(f'{name} did not serve within {START_LIMIT_SECONDS:.0f} s:\n{self._log_tail(name)}')
            time.sleep(_POLL_SECONDS)
        self.addresses[name] = read_address(path)
        self._report(name, 'ready')
        return self.addresses[name]

    def state_of(self, name: str) -> ServiceState:
        """Return what is written down about a started process."""
        pid = self._processes[name].pid
        return ServiceState(
            name=name,
            pid=pid,
            start_mark=start_mark(pid),
            address=self.addresses.get(name, ''),
            log_path=str(self._log_path(name)),
            base_model=self._base_model_of(name),
        )

    def address_file(self, name: str) -> Path:
        """Return where a process writes its address."""
        return self._folder / 'run' / f'{name}.json'

    def config_path(self, name: str) -> Path:
        """Return where the configuration of a process is."""
        return self._folder / 'config' / f'{name}.yaml'

    def _base_model_of(self, name: str) -> str:
        settings = yaml.safe_load(self.config_path(name).read_text(encoding='utf-8'))
        return str(settings.get('base_model', ''))

    def _log_path(self, name: str) -> Path:
        path = self._folder / 'logs' / f'{name}.log'
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _log_tail(self, name: str) -> str:
        lines = self._log_path(name).read_text(encoding='utf-8', errors='replace').splitlines()
        return '\n'.join(f'  {name} | {line}' for line in lines[-_LOG_TAIL_LINES:])


def service_of(name: str) -> str:
    """Return which service a process is of: 'sampler' of 'sampler-2'."""
    return name.partition('-')[0]


def read_address(path: Path) -> str:
    """Return the address in a file that a process wrote; empty where there is none."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))['address']
    except (OSError, ValueError, KeyError):
        return ''


def with_port(listen: str) -> str:
    """Return the address with a free port of this machine instead of port 0.

    Others can be told of it before the process that will serve there has started.

    Raises:
        StackError: it is no address, or cannot be listened on.
    """
    host, _, port = listen.rpartition(':')
    if not (host and port.isdigit() and int(port) < 1 << 16):
        raise StackError(f'{listen!r} is no address to listen on; write host:port, port 0 for any')
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((host.strip('[]'), int(port)))
            # Only listening tells of another that listens there, too.
            probe.listen()
        except OSError as error:
            raise StackError(f'cannot listen on {listen}: {error.strerror or error}') from None
        return f'{host}:{probe.getsockname()[1]}'


def write_private(path: Path, text: str) -> None:
    """Write a file that only its owner can read, from its first byte on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, 'w', encoding='utf-8') as file:
        file.write(text)
