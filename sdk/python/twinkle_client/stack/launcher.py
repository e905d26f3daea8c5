"""Starting, repairing, extending and stopping a stack."""

import fcntl
import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO

import yaml

from twinkle.data_format import base_model_id
from twinkle_client.stack.hosts import StackError, open_host
from twinkle_client.stack.options import StackOptions
from twinkle_client.stack.spawning import (
    Report,
    Spawner,
    read_address,
    service_of,
)
from twinkle_client.stack.startup import Launch, numbered, service_paths, wait_for_fleet
from twinkle_client.stack.state import ServiceState, StackState
from twinkle_client.stack.state_folder import check_free_space, folder_problem, make_private

STOP_GRACE_SECONDS = 20.0
_LOCK_SECONDS = 3.0
_POLL_SECONDS = 0.05


class StackBusyError(StackError):
    """Another program is starting or stopping services in this state folder."""


def start_stack(options: StackOptions, *, report: Report) -> StackState:
    """Start a stack and return it.

    A stack that is already running in this state folder is returned unchanged. The remaining processes of a broken
    stack are stopped first. If a start fails, all started services are stopped.

    Raises:
        StackError: A service did not start, or the state folder cannot be written; the message contains the cause.
    """
    try:
        return _start(options, report=report)
    except OSError as error:
        raise StackError(folder_problem(options.state_dir, error)) from error


def _start(options: StackOptions, *, report: Report) -> StackState:
    make_private(options.state_dir)
    with _locked(options.state_dir):
        state = StackState.load(options.state_dir)
        if state is not None and state.is_running():
            return state
        if state is not None:
            _stop(state, report=report)
        check_free_space(options)
        launch = Launch(options, report)
        try:
            return launch.run()
        except BaseException:
            _stop(launch.current_state(), report=report)
            raise


def revive_stack(state_dir: Path, *, report: Report, waiting: Collection[str] = ()) -> StackState | None:
    """Restart the exited services of a running stack with the same configurations and addresses.

    Args:
        state_dir: State folder of the stack.
        report: Called with a service and an event.
        waiting: Names of services whose restart is not due yet.

    Returns:
        The stack, or None if it was stopped.

    Raises:
        StackBusyError: The stack is being started or stopped.
        StackError: A service did not start; the message contains the end of its log.
    """
    with _locked(state_dir):
        state = StackState.load(state_dir)
        if state is None or state.is_running() or not state.address:
            return state
        spawner = Spawner(state_dir, report, host=open_host(state.placement, state_dir))
        ended = state.ended()
        state = state.without([item for item in state.services if not item.is_running() and item not in ended])
        for service in ended:
            if service.name in waiting:
                continue
            report(service.name, 'ended')
            service.process.end(grace_seconds=0.0)
            spawner.spawn(service.name, listen=service.address)
            spawner.addresses[service.name] = service.address
            state = state.with_service(spawner.state_of(service.name))
            state.save()
        for name in spawner.started:
            spawner.wait_for(name)
            state = state.with_service(spawner.state_of(name))
            state.save()
        if state.placement is not None:
            state = _follow_moved_trainers(_with_current_addresses(state, spawner), spawner)
        wait_for_fleet(state, spawner, waiting)
        return state


def _with_current_addresses(state: StackState, spawner: Spawner) -> StackState:
    """Return the stack with the addresses that its processes report; a start that was interrupted recorded old ones."""
    for service in state.services:
        address = read_address(spawner.address_file(service.name))
        if address and address != service.address and service.is_running():
            state = state.with_service(replace(service, address=address))
    state.save()
    return state


def _follow_moved_trainers(state: StackState, spawner: Spawner) -> StackState:
    """Restart the gateway with the new addresses of trainers that a cluster has restarted on other machines."""
    trainers = [item.address for item in state.services if service_of(item.name) == 'model']
    settings = yaml.safe_load(spawner.config_path('gateway').read_text(encoding='utf-8'))
    if settings['upstreams']['models'] == trainers:
        return state
    settings['upstreams']['models'] = trainers
    spawner.configure('gateway', settings)
    (gateway,) = (item for item in state.services if item.name == 'gateway')
    gateway.process.end(grace_seconds=STOP_GRACE_SECONDS)
    spawner.spawn('gateway', listen=gateway.address)
    spawner.addresses['gateway'] = gateway.address
    state = state.with_service(spawner.state_of('gateway'))
    state.save()
    spawner.wait_for('gateway')
    return state


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


def add_sampler(state_dir: Path, *, engine: str, base_model: str = '', report: Report) -> ServiceState:
    """Add a sampler to a running stack and wait until it has joined the fleet.

    Args:
        state_dir: State folder of the stack.
        engine: 'torch' or 'vllm'. Empty: the engine of the stack's first sampler.
        base_model: One of the stack's base models. Empty: the first.
        report: Callback for the progress.

    Raises:
        StackError: There is no running stack, it was stopped, or the sampler did not start.

    Concurrency: other programs may change the stack while the sampler loads its model.
    """
    spawner = Spawner(state_dir, report, host=open_host(_loaded_stack(state_dir).placement, state_dir))
    try:
        name = _spawn_sampler(spawner, state_dir, engine, base_model)
        spawner.wait_for(name)
        with _locked(state_dir):
            state = _reachable_stack(state_dir).with_service(spawner.state_of(name))
            state.save()
    except BaseException:
        _remove_started(spawner, state_dir, report=report)
        raise
    wait_for_fleet(state, spawner)
    return spawner.state_of(name)


def leave_stack(state_dir: Path, address: str, *, is_leaving: bool = True) -> bool:
    """Mark a service as leaving, so that it is not restarted when it exits, or remove the mark.

    Returns:
        Whether the stack in `state_dir` has a service at this address.
    """
    if not address or StackState.load(state_dir) is None:
        return False
    with _locked(state_dir):
        state = StackState.load(state_dir)
        service = next((item for item in state.services if item.address == address), None) if state else None
        if state is None or service is None:
            return False
        state.with_service(replace(service, is_leaving=is_leaving)).save()
        return True


def _spawn_sampler(spawner: Spawner, state_dir: Path, engine: str, base_model: str) -> str:
    """Start a sampler's process and record it; return its name."""
    with _locked(state_dir):
        state = _reachable_stack(state_dir)
        name = _next_sampler(state)
        settings = yaml.safe_load(spawner.config_path('sampler').read_text(encoding='utf-8'))
        if engine == 'vllm' and settings.get('torch', {}).get('patches'):
            raise StackError('the stack patches its model, which only the torch engine supports')
        if base_model and (base_model := base_model_id(base_model)) not in state.base_models:
            raise StackError(f'the stack does not serve {base_model}; it serves {", ".join(state.base_models)}')
        chosen = {'engine': engine, 'base_model': base_model}
        chosen = {field: value for field, value in chosen.items() if value}
        spawner.configure(name, {**settings, **service_paths(state_dir, spawner, name), **chosen})
        spawner.spawn(name)
        # Recorded at once, so that the process can be found if this program is killed.
        state.with_service(spawner.state_of(name)).save()
        return name


def _remove_started(spawner: Spawner, state_dir: Path, *, report: Report) -> None:
    """Stop the started processes and remove them from the stack's record."""
    for name in spawner.started:
        service = spawner.state_of(name)
        _stop_service(service, report=report)
        with _locked(state_dir):
            state = StackState.load(state_dir)
            if state is not None:
                # On a cluster, processes of different machines may have the same id.
                ended = [item for item in state.services if (item.name, item.pid) == (name, service.pid)]
                state.without(ended).save()


def _loaded_stack(state_dir: Path) -> StackState:
    state = StackState.load(state_dir)
    if state is None:
        raise StackError(f'no stack is running in {state_dir}; start one with `twinkle up`')
    return state


def _reachable_stack(state_dir: Path) -> StackState:
    state = _loaded_stack(state_dir)
    if not state.is_reachable():
        raise StackError(f'no stack is running in {state_dir}; start one with `twinkle up`')
    return state


def _next_sampler(state: StackState) -> str:
    taken = {service.name for service in state.services}
    return next(name for number in range(1, len(taken) + 2) if (name := numbered('sampler', number)) not in taken)


def _stop(state: StackState, *, report: Report) -> None:
    """Stop the services in reverse start order and delete the record."""
    for service in reversed(state.services):
        _stop_service(service, report=report)
    state.delete()


def _stop_service(service: ServiceState, *, report: Report) -> None:
    if service.is_running():
        report(service.name, 'stopping')
        service.process.end(grace_seconds=STOP_GRACE_SECONDS)
        report(service.name, 'stopped')
    else:
        service.process.end(grace_seconds=0.0)


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """Hold the exclusive lock of a state folder during the block, waiting for it for a few seconds."""
    end = time.monotonic() + _LOCK_SECONDS
    with (folder / 'lock').open('w') as file:
        while not _is_locked(file):
            if time.monotonic() > end:
                raise StackBusyError(f'another `twinkle up` or `twinkle down` is using {folder}; try again later')
            time.sleep(_POLL_SECONDS)
        yield


def _is_locked(file: IO[str]) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
