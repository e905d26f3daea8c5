"""Hosts of a stack's processes: this machine or a Ray cluster."""

import importlib
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from twinkle_client.stack.process_ids import end_process, is_same_process, resident_bytes, start_mark

FREE_PORT = '127.0.0.1:0'
"""Address of a service that listens on a free port of the machine that runs it."""
ANY_HOST = ('', '0.0.0.0', '[::]')  # noqa: S104 (compared, not bound)
"""Hosts in the addresses of services that listen on all interfaces of a machine."""
RESOURCE_SECONDS = 600.0
"""Longest wait for resources of a cluster; a cluster with autoscaling may have to start a machine."""
KILLED_STATUS = -9
"""Exit status that is reported for a process that no longer runs and is not a child of this program."""

children: list[subprocess.Popen[bytes]] = []
"""Services started by this program. The references prevent warnings about processes that outlive a `Spawner`."""


class StackError(Exception):
    """An operation on a stack failed; the message states the reason."""


@dataclass(frozen=True, kw_only=True)
class Command:
    """A Python program to run."""

    arguments: Sequence[str]
    """Arguments of the Python interpreter."""
    log: Path
    """File to which the output is appended."""
    folder: Path
    """Working directory."""
    listen: str
    """Address of the service, 'host:port'; with `FREE_PORT`, its host is the machine that runs the program."""


class ServiceProcess(Protocol):
    """A process of a service. On a cluster, every method may raise StackError if the cluster cannot be reached."""

    @property
    def pid(self) -> int:
        """Process id on its machine."""
        ...

    @property
    def start_mark(self) -> str:
        """Mark that distinguishes the process from a later process with the same id; see `process_ids.start_mark`."""
        ...

    @property
    def actor(self) -> str:
        """Cluster and name of the actor that runs the process; empty on this machine."""
        ...

    def is_running(self) -> bool:
        """Return whether the process is running."""
        ...

    def exit_status(self) -> int | None:
        """Return the exit status, which is negative after a signal, or None while the process is running."""
        ...

    def resident_bytes(self) -> int:
        """Return the resident memory of the process and its descendants; 0 if it cannot be read."""
        ...

    def end(self, *, grace_seconds: float) -> bool:
        """Terminate the process, kill it if it does not exit in time, and return False if it was killed.

        If the process is not running, only release its resources.
        """
        ...


class Place(Protocol):
    """Reserved resources for a process."""

    def start(self, command: Command) -> ServiceProcess:
        """Start the process with these resources; `ServiceProcess.end` releases them.

        Raises:
            StackError: The process could not be started; the resources are released.
        """
        ...

    def release(self) -> None:
        """Release the resources of a place without a process."""
        ...


class ProcessHost(Protocol):
    """Starts the processes of a stack."""

    @property
    def address(self) -> str:
        """Address of this machine for the processes, without a port."""
        ...

    def reserve(self, name: str, *, count: int) -> Place:
        """Wait for resources for a process and reserve them.

        Args:
            name: Name of the process.
            count: Number of devices that the process needs if it uses devices.

        Raises:
            StackError: There were no resources in time.
        """
        ...

    def end_unrecorded(self) -> None:
        """End all remaining processes of the stack on a cluster, recorded or not, and release their places."""
        ...


class LocalProcess:
    """A process on this machine."""

    actor = ''

    def __init__(self, pid: int, mark: str, child: 'subprocess.Popen[bytes] | None' = None) -> None:
        self.pid = pid
        self.start_mark = mark
        self._child = child

    def is_running(self) -> bool:
        return is_same_process(self.pid, self.start_mark)

    def exit_status(self) -> int | None:
        if self._child is not None:
            return self._child.poll()
        return None if self.is_running() else KILLED_STATUS

    def resident_bytes(self) -> int:
        return resident_bytes(self.pid) if self.is_running() else 0

    def end(self, *, grace_seconds: float) -> bool:
        has_exited = end_process(self.pid, self.start_mark, grace_seconds=grace_seconds)
        children[:] = [child for child in children if child.poll() is None]
        return has_exited


class LocalHost:
    """Starts processes on this machine."""

    address = '127.0.0.1'

    def reserve(self, name: str, *, count: int) -> 'LocalPlace':
        """Return a place immediately; all processes share the devices of this machine."""
        del name, count
        return LocalPlace()

    def end_unrecorded(self) -> None:
        """Do nothing: a process of this machine is recorded as soon as it has started."""


class LocalPlace:
    """A place on this machine."""

    def start(self, command: Command) -> LocalProcess:
        child = start_child(command)
        children.append(child)
        return LocalProcess(child.pid, start_mark(child.pid), child)

    def release(self) -> None:
        """Do nothing: nothing is reserved."""


def start_child(command: Command, *, prefix: Sequence[str] = ()) -> 'subprocess.Popen[bytes]':
    """Start a Python program as a child of this process, with `prefix` before its other interpreter arguments."""
    with command.log.open('ab') as log:
        return subprocess.Popen(
            [sys.executable, *prefix, *command.arguments, '--set', f'listen={command.listen}'],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            cwd=command.folder,
            # Threads that spin while they wait for work would take the cores from the other services.
            env={'OMP_WAIT_POLICY': 'PASSIVE', **os.environ},
            # Ctrl-C must not reach the services, which are stopped in order.
            start_new_session=True,
        )


@dataclass(frozen=True, kw_only=True)
class RayPlacement:
    """Placement of a stack on a Ray cluster."""

    cluster: str
    """Address of the cluster, 'host:port'."""
    resources: Mapping[str, Mapping[str, float]]
    """Resources of each process of a service, per device of its mesh, such as `{'sampler': {'GPU': 1}}`."""


def open_host(
    placement: RayPlacement | None, state_dir: Path, *, wait_seconds: float = RESOURCE_SECONDS
) -> ProcessHost:
    """Return the host of the stack in a state folder: this machine, or a Ray cluster.

    Args:
        placement: Placement on a cluster, or None for this machine.
        state_dir: State folder of the stack.
        wait_seconds: Longest wait for resources of a cluster.

    Raises:
        StackError: Ray is not installed, or the cluster cannot be reached.
    """
    return _ray_host().RayHost(placement, state_dir, wait_seconds=wait_seconds) if placement else LocalHost()


def find_process(pid: int, mark: str, actor: str) -> ServiceProcess:
    """Return the process with a recorded id, mark and actor."""
    return _ray_host().RayProcess(pid, mark, actor) if actor else LocalProcess(pid, mark)


def find_cluster(address: str, resources: Mapping[str, Mapping[str, float]]) -> RayPlacement:
    """Connect to a Ray cluster and return the placement of a stack on it; see `ray_host.find_cluster`."""
    return _ray_host().find_cluster(address, resources)


def _ray_host() -> Any:
    """Return the module that needs Ray, which is an optional dependency."""
    if (Path.home() / '.ray' / 'auth_token').is_file():
        # Ray 2.60 uses a saved token for the address 'auto' only, and reads the mode when it is imported.
        os.environ.setdefault('RAY_AUTH_MODE', 'token')
    try:
        return importlib.import_module('twinkle_client.stack.ray_host')
    except ModuleNotFoundError as error:
        if error.name != 'ray':
            raise
        raise StackError("Ray is not installed; install it with `pip install 'twinkle-grpc[ray]'`") from None
