"""Samplers that are added to a running stack and removed from it."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinkle.data_format import base_model_id
from twinkle_client.errors import Error, RetryableError
from twinkle_client.stack.gpus import unused_share, usable_gpus, with_gpus
from twinkle_client.stack.hosts import Place, StackError, open_host
from twinkle_client.stack.joining import wait_until_joined
from twinkle_client.stack.spawning import (
    START_LIMIT_SECONDS,
    Report,
    Spawner,
    address_file,
    end_service,
    read_address,
    service_of,
)
from twinkle_client.stack.startup import numbered, service_paths
from twinkle_client.stack.state import ServiceState, StackState, reachable
from twinkle_client.stack.state_folder import locked

_LOCK_SECONDS = 60.0
"""Longest wait for a restart in progress, before a sampler is started or drained."""


def add_sampler(state_dir: Path, *, engine: str, base_model: str = '', report: Report) -> ServiceState:
    """Add a sampler to a running stack and wait until it has joined the fleet.

    Args:
        state_dir: State folder of the stack.
        engine: 'torch' or 'vllm'. Empty: the engine of the base model's first sampler.
        base_model: One of the stack's base models. Empty: the first.
        report: Callback for the progress.

    Raises:
        StackError: There is no running stack, the stack was stopped, or the sampler did not start.

    Concurrency: other programs may change the stack while the sampler waits for resources and loads its model.
    """
    remove_ended(state_dir)
    state = _reachable_stack(state_dir)
    spawner = Spawner(state_dir, report, host=open_host(state.placement, state_dir))
    settings = _settings_of_new(state, spawner, engine, base_model)
    place = spawner.reserve('sampler')
    try:
        name = _spawn_sampler(spawner, state_dir, settings, place)
        address = spawner.wait_for(name)
        # The lock may be held for a long time, because services that are being restarted also load a model.
        with locked(state_dir, seconds=START_LIMIT_SECONDS):
            _record_address(state_dir, spawner.state_of(name))
    except BaseException:
        _remove_started(spawner, state_dir, report=report)
        raise
    wait_until_joined(
        reachable(state.address), state.read_api_key(), {address}, check=spawner.check_running, ca=state.ca
    )
    return spawner.state_of(name)


def drain_replica(state_dir: Path, replica_id: str, address: str, *, drain: Callable[[str], object]) -> None:
    """Drain a replica, which finishes its requests, leaves the fleet and exits.

    A service of the stack in `state_dir` is first marked as leaving, so that the stack does not restart it.
    `remove_ended` removes the service from the record afterwards.

    Args:
        state_dir: State folder of the stack. The replica need not belong to the stack.
        replica_id: Id of the replica.
        address: Address of the replica; empty if unknown.
        drain: Requests the drain of a replica id; see `FleetAdministration.drain`.

    Raises:
        StackBusyError: Another program is starting or stopping services.
        NotFoundError: The replica does not exist.
    """
    is_marked = _mark(state_dir, address, is_leaving=True)
    try:
        drain(replica_id)
    except Error as error:
        # After a lost connection, the gateway may have received the request.
        if is_marked and not isinstance(error, RetryableError):
            _mark(state_dir, address, is_leaving=False)
        raise


def remove_ended(state_dir: Path) -> None:
    """Remove the samplers that have left a stack from its record, and release their resources.

    A sampler whose start was interrupted is removed too. If it is running, it stays, and its address is recorded.

    Raises:
        StackBusyError: Another program is starting or stopping services.
    """
    state = StackState.load(state_dir)
    if state is None or _cleaned(state) == state:
        return
    with locked(state_dir):
        state = StackState.load(state_dir)
        if state is not None:
            cleaned = _cleaned(state)
            names = {service.name for service in cleaned.services}
            for service in state.services:
                if service.name not in names:
                    service.process.end(grace_seconds=0.0)
            cleaned.save()


def _cleaned(state: StackState) -> StackState:
    """Return the stack without samplers that have exited permanently, and with the addresses of ready samplers."""
    for service in state.services:
        if service_of(service.name) == 'sampler' and (service.is_leaving or not service.address):
            if not service.is_running():
                state = state.without([service])
            elif address := read_address(address_file(state.state_dir, service.name)):
                state = state.with_service(replace(service, address=address))
    return state


def _mark(state_dir: Path, address: str, *, is_leaving: bool) -> bool:
    """Mark the service at an address as leaving, or remove the mark; return whether the stack has such a service."""
    if not address or StackState.load(state_dir) is None:
        return False
    with locked(state_dir, seconds=_LOCK_SECONDS):
        state = StackState.load(state_dir)
        service = next((item for item in state.services if item.address == address), None) if state else None
        if state is None or service is None:
            return False
        state.with_service(replace(service, is_leaving=is_leaving)).save()
        return True


def _settings_of_new(state: StackState, spawner: Spawner, engine: str, base_model: str) -> dict[str, Any]:
    """Return the configuration of the base model's first sampler, changed for a new sampler with the given engine."""
    base_model = base_model_id(base_model) if base_model else state.base_model
    if base_model not in state.base_models:
        raise StackError(f'the stack does not serve {base_model}; it serves {", ".join(state.base_models)}')
    samplers = (item.name for item in state.services if service_of(item.name) == 'sampler')
    similar = next((name for name in samplers if spawner.settings_of(name).get('base_model') == base_model), 'sampler')
    settings = spawner.settings_of(similar)
    if engine == 'vllm' and settings.get('torch', {}).get('patches'):
        raise StackError('the stack patches its model, which only the torch engine supports; use torch')
    settings = {**settings, 'base_model': base_model, 'engine': engine or settings['engine']}
    if not (gpus := settings.get('gpus')):
        return settings
    running = (spawner.settings_of(item.name) for item in state.services if item.is_running())
    return with_gpus(settings, unused_share(usable_gpus() or gpus, running, len(gpus)))


def _spawn_sampler(spawner: Spawner, state_dir: Path, settings: dict[str, Any], place: Place) -> str:
    """Start a sampler's process in a reserved place and record it; return its name."""
    try:
        with locked(state_dir, seconds=_LOCK_SECONDS):
            state = _reachable_stack(state_dir)
            name = _next_sampler(state)
            spawner.configure(name, {**settings, **service_paths(state_dir, spawner, name)})
            spawner.spawn(name, place=place)
            # The process is recorded immediately, so that it can be found if this program is killed.
            state.with_service(spawner.state_of(name)).save()
            return name
    except BaseException:
        if not spawner.started:
            place.release()
        raise


def _record_address(state_dir: Path, service: ServiceState) -> None:
    """Record that a started sampler is ready."""
    state = StackState.load(state_dir)
    # On a cluster, processes of different machines may have the same id.
    if state is None or all((item.name, item.pid) != (service.name, service.pid) for item in state.services):
        raise StackError('the stack was stopped while the sampler started')
    state.with_service(service).save()


def _remove_started(spawner: Spawner, state_dir: Path, *, report: Report) -> None:
    """Stop the started processes and remove them from the stack's record."""
    for name in spawner.started:
        service = spawner.state_of(name)
        end_service(service, report)
        with locked(state_dir, seconds=_LOCK_SECONDS):
            state = StackState.load(state_dir)
            if state is not None:
                # On a cluster, processes of different machines may have the same id.
                ended = [item for item in state.services if (item.name, item.pid) == (name, service.pid)]
                state.without(ended).save()


def _reachable_stack(state_dir: Path) -> StackState:
    state = StackState.load(state_dir)
    if state is None or not state.is_reachable():
        raise StackError(f'no stack is running in {state_dir}; start one with `twinkle up`')
    return state


def _next_sampler(state: StackState) -> str:
    taken = {service.name for service in state.services}
    return next(name for number in range(1, len(taken) + 2) if (name := numbered('sampler', number)) not in taken)
