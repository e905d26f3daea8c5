"""Starting, repairing, extending and stopping a local stack."""

import fcntl
import importlib
import os
import secrets
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import IO, Any

import yaml

from twinkle.data_format import base_model_id
from twinkle_client.stack.certificates import renewed_certificates, tls_settings
from twinkle_client.stack.joining import wait_until_joined
from twinkle_client.stack.options import SERVICES, StackOptions
from twinkle_client.stack.processes import end_process
from twinkle_client.stack.spawning import (
    Report,
    Spawner,
    StackError,
    children,
    mesh_size,
    read_address,
    service_of,
    with_port,
    write_private,
)
from twinkle_client.stack.state import ServiceState, StackState, key_path, reachable, read_secret
from twinkle_client.stack.state_folder import check_free_space, folder_problem, make_private

STOP_GRACE_SECONDS = 20.0
_LOCK_SECONDS = 3.0
_POLL_SECONDS = 0.05
_START_RESTARTS = 5
"""Maximum number of restarts of each service that is killed while the stack starts. The model service skips work that
crashes it after at most this many crashes."""


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
        launch = _Launch(options, report)
        try:
            return launch.run()
        except BaseException:
            _stop(launch.current_state(), report=report)
            raise


def revive_stack(state_dir: Path, *, report: Report, waiting: Collection[str] = ()) -> StackState | None:
    """Restart the exited services of a running stack, with their configuration and at their addresses.

    Args:
        state_dir: State folder of the stack.
        report: Called with a service and an event.
        waiting: Names of services that are not restarted now.

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
        spawner = Spawner(state_dir, report)
        ended = state.ended()
        state = state.without([item for item in state.services if not item.is_running() and item not in ended])
        for service in ended:
            if service.name in waiting:
                continue
            report(service.name, 'ended')
            spawner.spawn(service.name, listen=service.address)
            spawner.addresses[service.name] = service.address
            state = state.with_service(spawner.state_of(service.name))
            state.save()
        for name in spawner.started:
            spawner.wait_for(name)
        _wait_for_fleet(state, spawner, waiting)
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
    spawner = Spawner(state_dir, report)
    try:
        name = _spawn_sampler(spawner, state_dir, engine, base_model)
        spawner.wait_for(name)
        with _locked(state_dir):
            state = _reachable_stack(state_dir).with_service(spawner.state_of(name))
            state.save()
    except BaseException:
        _remove_started(spawner, state_dir, report=report)
        raise
    _wait_for_fleet(state, spawner)
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
    if StackState.load(state_dir) is None:
        raise _no_stack(state_dir)
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
        spawner.configure(name, {**settings, **_paths(state_dir, spawner, name), **chosen})
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
                state.without([item for item in state.services if item.pid == service.pid]).save()


def _reachable_stack(state_dir: Path) -> StackState:
    state = StackState.load(state_dir)
    if state is None or not state.is_reachable():
        raise _no_stack(state_dir)
    return state


def _no_stack(state_dir: Path) -> StackError:
    return StackError(f'no stack is running in {state_dir}; start one with `twinkle up`')


def _tokenizers(base_models: Sequence[str]) -> dict[str, str]:
    """Return the hub ids, without the hub's prefix, from which clients load the tokenizers of base models."""
    # The dependencies of `twinkle.hub` are installed with the services, not with the client alone.
    hub = importlib.import_module('twinkle.hub')
    pairs = [(name, base_model_id(hub.without_alias(name))) for name in base_models]
    return {name: hub.HubId.parse(target).name for name, target in pairs if hub.local_path(target) is None}


class _Launch:
    """The start of one stack."""

    def __init__(self, options: StackOptions, report: Report) -> None:
        self._options = options
        self._folder = options.state_dir
        self._token = secrets.token_urlsafe(32)
        self._authority: Path | None = None
        self._spawner = Spawner(self._folder, report, restart_limit=_START_RESTARTS, on_restart=self._save)

    def run(self) -> StackState:
        """Start all services, record the stack and return it."""
        options, spawner = self._options, self._spawner
        gateway = with_port(options.listen)
        # Fixing the ports now keeps them across restarts of the gateway.
        http = with_port(options.http_listen) if options.http_listen else ''
        self._authority = renewed_certificates(self._folder / 'tls', gateway) if options.tls else None
        # With TLS, services use a separate port that requires client certificates.
        internal = with_port('127.0.0.1:0') if options.tls else ''
        self._start('checkpoint', {'base_models': list(options.base_models)})
        self._start('data', {'base_models': list(options.base_models)})
        addresses = {f'{name}_address': spawner.wait_for(name) for name in ('checkpoint', 'data')}
        for base_model in options.base_models:
            self._start_model(base_model, addresses, gateway=internal or reachable(gateway))
        for name in spawner.started:
            if service_of(name) == 'model':
                spawner.wait_for(name)
        self._start('gateway', {**self._gateway_settings(gateway, http), 'internal_listen': internal})
        for name in spawner.started:
            if name not in spawner.addresses:
                spawner.wait_for(name)
        state = self._save(http_address=read_address(spawner.address_file('gateway-http')))
        _wait_for_fleet(state, spawner)
        return state

    def _start_model(self, base_model: str, addresses: Mapping[str, str], *, gateway: str) -> None:
        """Start the model service and the samplers of one base model."""
        options, index = self._options, self._options.base_models.index(base_model)
        # Trainer and samplers must load the same model, so both get the patches.
        patches = {'patches': dict(options.patches)} if options.patches else {}
        processes = len(options.base_models) * mesh_size(options.services.get('model', {}))
        threads = max(1, _trainer_threads() // processes)
        model = {'base_model': base_model, **addresses, **patches, 'thread_count': threads}
        model = {**model, 'full_parameters': True} if options.full_parameters else model
        self._start(_numbered('model', index + 1), model)
        shared = {'base_model': base_model, 'checkpoint_address': addresses['checkpoint_address']}
        sampler = {**shared, 'engine': options.engine_of(base_model), 'gateways': [gateway]}
        sampler = {**sampler, 'torch': patches} if patches else sampler
        if index == 0:
            # Samplers that are added later use this configuration, even if the stack starts without samplers.
            self._spawner.configure('sampler', self._settings('sampler', sampler))
        for number in range(index * options.sampler_count, (index + 1) * options.sampler_count):
            self._start(_numbered('sampler', number + 1), sampler)

    def current_state(self, *, http_address: str = '') -> StackState:
        """Return the started services; the stack counts as up once it has the gateway's address."""
        started = [self._spawner.state_of(name) for name in self._spawner.started]
        services = tuple(sorted(started, key=lambda item: (SERVICES.index(service_of(item.name)), item.name)))
        return StackState.create(
            self._folder,
            base_model=self._options.base_model,
            services=services,
            http_address=http_address,
            more_models=self._options.more_models,
            ca=str(self._authority or ''),
        )

    def _gateway_settings(self, listen: str, http_listen: str) -> dict[str, Any]:
        addresses, http_file = self._spawner.addresses, self._spawner.address_file('gateway-http')
        http_file.unlink(missing_ok=True)
        return {
            'listen': listen,
            'http_listen': http_listen,
            'http_address_file': str(http_file),
            'upstreams': {
                'models': [addresses[name] for name in self._spawner.started if service_of(name) == 'model'],
                **{name: addresses[name] for name in ('data', 'checkpoint')},
            },
            'bootstrap_key': self._api_key(),
            'tokenizers': _tokenizers(self._options.base_models),
        }

    def _start(self, name: str, settings: Mapping[str, Any]) -> None:
        self._spawner.configure(name, self._settings(name, settings))
        self._spawner.spawn(name)
        # Recorded at once, so that the process can be found if this program is killed.
        self._save()

    def _save(self, *, http_address: str = '') -> StackState:
        state = self.current_state(http_address=http_address)
        state.save()
        return state

    def _settings(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(self._options.services.get(service_of(name), {}))
        telemetry = {'trace_dir': str(self._folder / 'traces'), **own.pop('telemetry', {})}
        if 'torch' in settings and 'torch' in own:
            own['torch'] = {**settings['torch'], **own['torch']}
        return {
            'listen': '127.0.0.1:0',
            **_paths(self._folder, self._spawner, name),
            'internal_token': self._token,
            'telemetry': telemetry,
            **({'tls': tls_settings(self._authority, name)} if self._authority else {}),
            **settings,
            **own,
        }

    def _api_key(self) -> str:
        path = key_path(self._folder)
        key = read_secret(path)
        if not key:
            key = f'tml-{secrets.token_urlsafe(32)}'
            write_private(path, f'{key}\n')
        return key


def _paths(folder: Path, spawner: Spawner, name: str) -> dict[str, str]:
    """Return the configured paths of a process."""
    return {'state_dir': str(folder / 'data' / name), 'address_file': str(spawner.address_file(name))}


def _numbered(service: str, number: int) -> str:
    return service if number == 1 else f'{service}-{number}'


def _next_sampler(state: StackState) -> str:
    taken = {service.name for service in state.services}
    return next(name for number in range(1, len(taken) + 2) if (name := _numbered('sampler', number)) not in taken)


def _wait_for_fleet(state: StackState, spawner: Spawner, waiting: Collection[str] = ()) -> None:
    running = [item for item in state.services if item.is_restarted and item.name not in waiting]
    samplers = {item.address for item in running if service_of(item.name) == 'sampler'}
    wait_until_joined(
        reachable(state.address), state.read_api_key(), samplers, check=spawner.check_running, ca=state.ca
    )


def _trainer_threads() -> int:
    """Return half of the cores: parallel threads slow down sharply when other processes need a core."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(1, cores // 2)


def _stop(state: StackState, *, report: Report) -> None:
    """Stop the services in reverse start order and delete the record."""
    for service in reversed(state.services):
        _stop_service(service, report=report)
    state.delete()


def _stop_service(service: ServiceState, *, report: Report) -> None:
    if service.is_running():
        report(service.name, 'stopping')
        end_process(service.pid, service.start_mark, grace_seconds=STOP_GRACE_SECONDS)
        report(service.name, 'stopped')
    children[:] = [child for child in children if child.poll() is None]


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
