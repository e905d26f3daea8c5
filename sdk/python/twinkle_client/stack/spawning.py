"""Start of service processes: their configurations, commands and addresses."""

import json
import math
import os
import random
import shutil
import signal
import socket
import time
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import yaml

from twinkle_client.stack.hosts import FREE_PORT, Command, LocalHost, Place, ProcessHost, ServiceProcess, StackError
from twinkle_client.stack.state import ServiceState

_POLL_SECONDS = 0.05
_LOG_TAIL_LINES = 15
_LEAST_FREE_BYTES = 1 << 20
"""Free space below which error messages report a full disk."""
_MESH_SHUTDOWN_SECONDS = 15
"""Time after which torchrun kills processes of a mesh that do not exit; less than `STOP_GRACE_SECONDS`."""
STOP_GRACE_SECONDS = 20.0
"""Time after which a service that does not exit is killed."""
_STABLE_PORTS = range(20_000, 32_000)
"""Ports below the ports that systems give to outgoing connections, so that a chosen port stays free until its process
listens."""
_PORT_ATTEMPTS = 16
START_LIMIT_SECONDS = 600.0
"""Time limit for the start of a service, which may load a model from a slow disk."""


class Report(Protocol):
    """Callback for events of services."""

    def __call__(self, service: str, event: str) -> None:
        """Report an event of a service: 'starting', 'ready', 'ended', 'stopping' or 'stopped'."""
        ...


class Spawner:
    """Starts service processes and waits for them.

    The name of a process begins with its service. Further processes have a suffix: 'sampler-2', 'model-trainer-2'.
    Configurations, addresses and logs are stored in `folder`.
    """

    def __init__(
        self,
        folder: Path,
        report: Report,
        *,
        host: ProcessHost | None = None,
        restart_limit: int = 0,
        on_restart: Callable[[], object] = lambda: None,
    ) -> None:
        """Initialize without processes.

        Args:
            folder: Folder of configurations, addresses and logs.
            report: Callback for events of services.
            host: Starts the processes. Default: on this machine.
            restart_limit: Maximum number of restarts of each process that is killed by a signal while this program
                waits. A service that crashes on recovered work skips that work after a few restarts.
            on_restart: Called after each restart, because the process id has changed.
        """
        self._folder = folder
        self._report = report
        self._host = host or LocalHost()
        self._restart_limit = restart_limit
        self._on_restart = on_restart
        self._restarts = Counter[str]()
        self._processes: dict[str, ServiceProcess] = {}
        self.addresses: dict[str, str] = {}
        """Addresses of the processes that are ready, by name."""

    @property
    def started(self) -> tuple[str, ...]:
        """Names of the started processes, in start order."""
        return tuple(self._processes)

    def configure(self, name: str, settings: Mapping[str, Any]) -> None:
        """Write a process's configuration file, readable by its owner only."""
        # The keys are not sorted, because patches are applied in order.
        write_private(self.config_path(name), yaml.safe_dump(dict(settings), sort_keys=False))

    def settings_of(self, name: str) -> dict[str, Any]:
        """Return the configuration of a process."""
        return yaml.safe_load(self.config_path(name).read_text(encoding='utf-8'))

    def reserve(self, name: str) -> Place:
        """Reserve resources for a process with the configuration of `name`; see `ProcessHost.reserve`."""
        return self._host.reserve(name, count=mesh_size(self.settings_of(name)))

    def spawn(self, name: str, *, listen: str = '', place: Place | None = None) -> None:
        """Start a configured process.

        Args:
            name: Name of the process.
            listen: Address that overrides the configured address.
            place: Reserved resources. Default: resources are reserved first.

        Raises:
            StackError: There were no resources in time, or the process could not be started.
        """
        self._report(name, 'starting')
        self.address_file(name).unlink(missing_ok=True)
        log, settings = self._log_path(name), self.settings_of(name)
        # The service bounds the size of its log; a JSON string is also a YAML string.
        words = ['--config', str(self.config_path(name)), '--set', f'telemetry.log_file={json.dumps(str(log))}']
        command = Command(
            arguments=[*self._launcher(name), '-m', f'twinkle_services.{service_of(name)}', *words],
            log=log,
            folder=self._folder,
            listen=listen or settings.get('listen', FREE_PORT),
        )
        self._processes[name] = (place or self.reserve(name)).start(command)

    def wait_for(self, name: str) -> str:
        """Wait until a process is ready and return its address.

        Raises:
            StackError: A started process exited, or `name` was not ready in time. The message contains the end of the
                process's log.
        """
        path = self.address_file(name)
        end = time.monotonic() + START_LIMIT_SECONDS
        while not path.exists():
            self.check_running()
            if time.monotonic() > end:
                raise StackError(f'{name} was not ready within {START_LIMIT_SECONDS:.0f} s:\n{self._log_tail(name)}')
            time.sleep(_POLL_SECONDS)
        self.addresses[name] = read_address(path)
        self._report(name, 'ready')
        return self.addresses[name]

    def check_running(self) -> None:
        """Check that all started processes are running, and restart killed processes up to `restart_limit` times.

        Raises:
            StackError: A process exited; the message contains the end of its log.
        """
        for name, process in list(self._processes.items()):
            status = process.exit_status()
            if status is not None and status < 0 and self._restarts[name] < self._restart_limit:
                self._restart(name)
            elif status is not None:
                raise StackError(f'{name} {_exit_text(status)}; its log ends with:\n{self._log_tail(name)}')

    def _restart(self, name: str) -> None:
        """Start a killed process again, and wait for it if it was ready before."""
        self._restarts[name] += 1
        self._report(name, 'ended')
        self._processes[name].end(grace_seconds=0.0)
        self.spawn(name, listen=self.addresses.get(name, ''))
        self._on_restart()
        if name in self.addresses:
            self.wait_for(name)

    def state_of(self, name: str) -> ServiceState:
        """Return the record of a started process."""
        process = self._processes[name]
        return ServiceState(
            name=name,
            pid=process.pid,
            start_mark=process.start_mark,
            actor=process.actor,
            address=self.addresses.get(name, ''),
            log_path=str(self._log_path(name)),
            base_model=self._base_model_of(name),
        )

    def address_file(self, name: str) -> Path:
        """Return the path of the file to which a process writes its address."""
        return address_file(self._folder, name)

    def config_path(self, name: str) -> Path:
        """Return the path of a process's configuration file."""
        return self._folder / 'config' / f'{name}.yaml'

    def _launcher(self, name: str) -> list[str]:
        """Return the interpreter arguments that run a mesh with torchrun; empty for a single process."""
        count = mesh_size(self.settings_of(name))
        options = [f'--nproc-per-node={count}', f'--shutdown-timeout={_MESH_SHUTDOWN_SECONDS}']
        torchrun = ['-m', 'torch.distributed.run', '--standalone', *options]
        return torchrun if count > 1 else []

    def _base_model_of(self, name: str) -> str:
        return str(self.settings_of(name).get('base_model', ''))

    def _log_path(self, name: str) -> Path:
        path = self._folder / 'logs' / f'{name}.log'
        path.parent.mkdir(parents=True, exist_ok=True)
        return path

    def _log_tail(self, name: str) -> str:
        lines = self._log_path(name).read_text(encoding='utf-8', errors='replace').splitlines()
        if shutil.disk_usage(self._folder).free < _LEAST_FREE_BYTES:
            lines.append(f'the disk of {self._folder} is full; free some space, or choose another --state-dir')
        return '\n'.join(f'  {name} | {line}' for line in lines[-_LOG_TAIL_LINES:] or ['(its log is empty)'])


def _exit_text(status: int) -> str:
    """Return a description of an exit status, as a part of a sentence."""
    if status >= 0:
        return f'exited with status {status}'
    hint = ' (the host may have too little memory)' if -status == signal.SIGKILL else ''
    return f'was killed by {signal.Signals(-status).name}{hint}'


def end_service(service: ServiceState, report: Report) -> None:
    """Stop a service, or release the resources of a service that has exited."""
    if service.is_running():
        report(service.name, 'stopping')
        service.process.end(grace_seconds=STOP_GRACE_SECONDS)
        report(service.name, 'stopped')
    else:
        service.process.end(grace_seconds=0.0)


def mesh_size(settings: Mapping[str, Any]) -> int:
    """Return the number of processes of a service with these settings."""
    return math.prod(int(size) for size in settings.get('mesh', {}).values())


def service_of(name: str) -> str:
    """Return the service of a process, such as 'sampler' for 'sampler-2'."""
    return name.partition('-')[0]


def address_file(folder: Path, name: str) -> Path:
    """Return the path of the file to which a process of the stack in `folder` writes its address."""
    return folder / 'run' / f'{name}.json'


def read_address(path: Path) -> str:
    """Return the address in a process's address file; empty if it cannot be read."""
    try:
        return json.loads(path.read_text(encoding='utf-8'))['address']
    except (OSError, ValueError, KeyError):
        return ''


def with_port(listen: str) -> str:
    """Replace port 0 of an address with a free port, so that the address is known before the process starts.

    Raises:
        StackError: The address is malformed, or this machine cannot listen on it.
    """
    host, _, port = listen.rpartition(':')
    if not (host and port.isdigit() and int(port) < 1 << 16):
        raise StackError(f'invalid listen address {listen!r}; use host:port, with port 0 for a free port')
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    candidates = [int(port)] if int(port) else [*random.sample(_STABLE_PORTS, _PORT_ATTEMPTS), 0]
    problem = ''
    for candidate in candidates:
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host.strip('[]'), candidate))
                # With SO_REUSEADDR, only `listen` detects another listener on the port.
                probe.listen()
                return f'{host}:{probe.getsockname()[1]}'
            except OSError as error:
                problem = error.strerror or str(error)
    raise StackError(f'cannot listen on {listen}: {problem}; choose another address')


def write_private(path: Path, text: str) -> None:
    """Write a file that is readable by its owner only, from its creation on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, 'w', encoding='utf-8') as file:
        file.write(text)
