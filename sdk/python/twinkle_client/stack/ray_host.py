"""Processes of a stack on a Ray cluster. Each process is a child of an actor, which reserves its resources.

The state folder must be on storage that all machines of the cluster share: configurations, addresses, logs, journals
and checkpoints are files there.
"""

import logging
import os
import secrets
import signal
import socket
import threading
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import ray
from ray.exceptions import ActorUnavailableError, GetTimeoutError, RayActorError, RayError, RayTaskError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from twinkle_client.stack.hosts import ANY_HOST, KILLED_STATUS, Command, RayPlacement, StackError, start_child
from twinkle_client.stack.options import PLACED
from twinkle_client.stack.process_ids import end_process, resident_bytes, start_mark
from twinkle_client.stack.spawning import service_of, write_private

NAMESPACE = 'twinkle'
"""Ray namespace of the actors of all stacks."""
_START_SECONDS = 60.0
"""Time limit for the start of a process, which may have to wait for a slow disk."""
_CALL_SECONDS = 10.0
"""Time limit of a call that an actor answers immediately."""
_END_WITH_PARENT = (
    'import ctypes, os, signal, sys\n'
    'ctypes.CDLL(None).prctl(1, signal.SIGTERM)\n'  # PR_SET_PDEATHSIG, see prctl(2); it survives exec
    'os.getppid() == int(sys.argv[1]) or sys.exit(1)\n'  # the parent may already have exited
    'os.execv(sys.executable, [sys.executable, *sys.argv[2:]])\n'
)
"""Program with the arguments PARENT_ID PROGRAM...; it runs PROGRAM, which receives SIGTERM when the parent ends."""


class ServiceActor:
    """Runs one process of a service as its child. If the actor is killed, the process receives SIGTERM."""

    def __init__(self) -> None:
        self._child: Any = None

    def placed(self) -> None:
        """Return once the actor has its resources."""

    def start(self, command: Command) -> tuple[int, str]:
        """Start the process and return its id and its mark.

        Raises:
            StackError: The state folder is not on this machine.
        """
        host = cast('Any', ray.util).get_node_ip_address()
        if not command.log.parent.is_dir():
            raise StackError(f'{command.folder} is not on {host}; choose a --state-dir that all machines share')
        # A restarted process may be on a different machine than before.
        is_here = command.listen.rpartition(':')[0] in (host, *ANY_HOST)
        listen = command.listen if is_here else f'{host}:0'
        self._child = start_child(replace(command, listen=listen), prefix=('-c', _END_WITH_PARENT, str(os.getpid())))
        return self._child.pid, start_mark(self._child.pid)

    def exit_status(self) -> int | None:
        """Return the exit status of the process, or None while it is running."""
        return self._child.poll()

    def resident_bytes(self) -> int:
        """Return the resident memory of the process and its descendants."""
        return resident_bytes(self._child.pid)

    def end(self, grace_seconds: float) -> bool:
        """Terminate the process, kill it if it does not exit in time, and return False if it was killed."""
        has_exited = end_process(self._child.pid, start_mark(self._child.pid), grace_seconds=grace_seconds)
        self._child.wait()
        return has_exited


class _ActorEnded(Exception):
    """The actor no longer exists."""


class RayProcess:
    """A process that an actor runs."""

    def __init__(self, pid: int, mark: str, actor: str) -> None:
        """Describe a process.

        Args:
            pid: Process id on its machine.
            mark: See `ServiceProcess.start_mark`.
            actor: Address of the cluster and name of the actor, 'host:port/name'.
        """
        self.pid = pid
        self.start_mark = mark
        self.actor = actor

    def is_running(self) -> bool:
        return self.exit_status() is None

    def exit_status(self) -> int | None:
        try:
            return _result(self._find().exit_status.remote())
        except (GetTimeoutError, ActorUnavailableError):
            # A machine that does not respond may respond again later; Ray reports a lost machine after some time.
            return None
        except _LOST:
            return KILLED_STATUS
        except RayError as error:
            raise StackError(f'the Ray cluster does not answer: {error}') from error

    def resident_bytes(self) -> int:
        with suppress(GetTimeoutError, *_LOST):
            return _result(self._find().resident_bytes.remote())
        return 0

    def end(self, *, grace_seconds: float) -> bool:
        has_exited = False
        with suppress(GetTimeoutError, *_LOST):
            actor = self._find()
            try:
                has_exited = _result(actor.end.remote(grace_seconds), seconds=grace_seconds + _CALL_SECONDS)
            finally:
                ray.kill(actor)
        return has_exited

    def _find(self) -> Any:
        """Return the actor.

        Raises:
            _ActorEnded: The actor no longer exists.
            StackError: The cluster cannot be reached, so the process may still be running.
        """
        cluster, _, name = self.actor.partition('/')
        try:
            _connect(cluster)
        except StackError as error:
            raise StackError(
                f'{error}; if that cluster was shut down, delete stack.json in the state folder'
            ) from error
        try:
            return cast('Any', ray).get_actor(name, namespace=NAMESPACE)
        except ValueError as error:
            raise _ActorEnded from error
        except RayError as error:
            raise StackError(f'the Ray cluster at {cluster} does not answer: {error}') from error


_LOST = (RayActorError, _ActorEnded)
"""Errors of calls to an actor that no longer exists, because the actor or its machine ended."""


class RayHost:
    """Starts processes on a Ray cluster."""

    def __init__(self, placement: RayPlacement, state_dir: Path, *, wait_seconds: float) -> None:
        """Connect to the cluster.

        Args:
            placement: The cluster and the resources of services.
            state_dir: State folder of the stack; it must exist.
            wait_seconds: Longest wait for resources.

        Raises:
            StackError: The cluster cannot be reached.
        """
        _connect(placement.cluster)
        self._placement = placement
        self._wait_seconds = wait_seconds
        self._prefix = _stack_id(state_dir)
        self.address = cast('Any', ray.util).get_node_ip_address()

    def reserve(self, name: str, *, count: int) -> 'RayPlace':
        """Wait for a machine with free resources, and reserve them.

        Raises:
            StackError: No machine had free resources in time.
        """
        resources = self._resources_of(name, count)
        actor_name = f'{self._prefix}-{name}-{secrets.token_hex(4)}'
        actor = (
            cast('Any', ray)
            .remote(ServiceActor)
            .options(name=actor_name, namespace=NAMESPACE, lifetime='detached', **resources)
            .remote()
        )
        place = RayPlace(name, actor, f'{self._placement.cluster}/{actor_name}')
        try:
            if not place.wait(self._wait_seconds):
                raise StackError(_no_resources(name, resources, self._wait_seconds))
        except BaseException:
            place.release()
            raise
        return place

    def end_unrecorded(self) -> None:
        """Kill all remaining actors of the stack, with or without a record; their processes receive SIGTERM."""
        for found in cast('Any', ray.util).list_named_actors(all_namespaces=True):
            if found['namespace'] == NAMESPACE and found['name'].startswith(f'{self._prefix}-'):
                # An actor that another program ends at the same time is no longer found.
                with suppress(ValueError):
                    ray.kill(cast('Any', ray).get_actor(found['name'], namespace=NAMESPACE))

    def _resources_of(self, name: str, count: int) -> dict[str, Any]:
        """Return Ray's options for a process: the resources of a service in `PLACED`, otherwise this machine's node."""
        service = service_of(name)
        if service not in PLACED:
            node = cast('Any', ray).get_runtime_context().get_node_id()
            return {'num_cpus': 0, 'scheduling_strategy': NodeAffinitySchedulingStrategy(node, soft=False)}
        given = {kind: count * number for kind, number in self._placement.resources.get(service, {}).items()}
        cpus, gpus = given.pop('CPU', 0), given.pop('GPU', 0)
        return {'num_cpus': cpus, 'num_gpus': gpus, 'resources': given}


class RayPlace:
    """An actor without a process, which may still wait for its resources."""

    def __init__(self, name: str, actor: Any, address: str) -> None:
        """Describe the actor of the process `name`; see `RayProcess` for `address`."""
        self._name, self._actor, self._address = name, actor, address

    def wait(self, seconds: float) -> bool:
        """Wait until the actor has its resources, and return whether it got them in time.

        Raises:
            StackError: The actor was lost.
        """
        try:
            _result(self._actor.placed.remote(), seconds=seconds)
            return True
        except GetTimeoutError:
            return False
        except RayError as error:
            raise StackError(f'{self._name}: {error}') from error

    def start(self, command: Command) -> RayProcess:
        """Start the process.

        Raises:
            StackError: The machine does not have the state folder, or was lost.
        """
        try:
            pid, mark = _result(self._actor.start.remote(command), seconds=_START_SECONDS)
        except BaseException as error:
            self.release()
            if isinstance(error, RayTaskError) and isinstance(error.cause, StackError):
                raise StackError(str(error.cause)) from None
            if isinstance(error, RayError):
                raise StackError(f'{self._name}: {error}') from error
            raise
        return RayProcess(pid, mark, self._address)

    def release(self) -> None:
        ray.kill(self._actor)


def _stack_id(state_dir: Path) -> str:
    """Return the random id of a state folder, with which the names of its actors begin.

    The path is not used, because folders of different machines may have the same path.
    """
    path = state_dir / 'ray_id'
    if not path.exists():
        write_private(path, secrets.token_hex(8))
    return path.read_text(encoding='utf-8')


def find_cluster(address: str, resources: Mapping[str, Mapping[str, float]]) -> RayPlacement:
    """Connect to a cluster and return the placement of a stack on it.

    Args:
        address: Address of the cluster, or 'auto' for the cluster of this machine or of RAY_ADDRESS.
        resources: Resources by service. Default for model services and samplers: one GPU per process if the cluster has
            GPUs, otherwise one CPU.

    Raises:
        StackError: The cluster cannot be reached.
    """
    _connect(address)
    runtime = cast('Any', ray)
    default = {'GPU': 1.0} if runtime.cluster_resources().get('GPU') else {'CPU': 1.0}
    chosen = {service: dict(resources.get(service, default)) for service in PLACED}
    return RayPlacement(cluster=runtime.get_runtime_context().gcs_address, resources=chosen)


def _connect(address: str) -> None:
    """Connect to a cluster, unless this program is already connected.

    Raises:
        StackError: The cluster cannot be reached.
    """
    runtime = cast('Any', ray)
    if runtime.is_initialized():
        connected = runtime.get_runtime_context().gcs_address
        if address not in ('auto', connected):
            raise StackError(
                f'this program uses the Ray cluster at {connected}, not the cluster {address}; use a separate program'
            )
        return
    # Ray replaces the handler of SIGTERM.
    is_main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if is_main else None
    try:
        if address != 'auto':
            # Without this check, Ray would try to connect for minutes.
            host, _, port = address.rpartition(':')
            socket.create_connection((host.strip('[]'), int(port)), timeout=_CALL_SECONDS).close()
        runtime.init(address=address, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (OSError, ValueError, RuntimeError) as error:
        where = 'on this machine' if address == 'auto' else f'at {address}'
        raise StackError(f'no Ray cluster {where}; start one with `ray start --head`: {error}') from error
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _result(reference: Any, *, seconds: float = _CALL_SECONDS) -> Any:
    """Return the result of a call.

    Raises:
        GetTimeoutError: There was no result in time.
        RayActorError: The actor or its machine was lost.
    """
    return cast('Any', ray).get(reference, timeout=seconds)


def _no_resources(name: str, resources: Mapping[str, Any], seconds: float) -> str:
    """Return the error message for a process that no machine could run."""
    numbers = {'CPU': resources.get('num_cpus'), 'GPU': resources.get('num_gpus'), **resources.get('resources', {})}
    needed = ', '.join(f'{number:g} {kind}' for kind, number in numbers.items() if number)
    return (
        f'{name}: no machine of the cluster had {needed or "room"} within {seconds:.0f} s; '
        'add machines, end other programs, or change `resources` in the configuration of the stack'
    )
