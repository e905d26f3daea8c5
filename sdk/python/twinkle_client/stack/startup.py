"""The start of one stack: its processes and their configurations."""

import importlib
import itertools
import math
import os
import secrets
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from twinkle.data_format import base_model_id
from twinkle_client.stack.certificates import renewed_certificates, tls_settings
from twinkle_client.stack.gpus import GpuNeed, can_sample_on_gpu, divided, usable_gpus, with_gpus
from twinkle_client.stack.hosts import FREE_PORT, StackError, find_cluster, open_host
from twinkle_client.stack.joining import wait_until_joined
from twinkle_client.stack.options import SERVICES, StackOptions
from twinkle_client.stack.sections import with_defaults
from twinkle_client.stack.spawning import Report, Spawner, mesh_size, read_address, service_of, with_port, write_private
from twinkle_client.stack.state import StackState, key_path, reachable, read_secret

_START_RESTARTS = 5
"""Maximum number of restarts of each service that is killed while the stack starts. The model service skips work that
crashes it after at most this many crashes."""


class Launch:
    """The start of one stack.

    Raises:
        StackError: Resources are given without a Ray cluster, the cluster cannot be reached, or a chosen GPU does not
            exist.
    """

    def __init__(self, options: StackOptions, report: Report) -> None:
        self._options = options
        self._folder = options.state_dir
        self._token = secrets.token_urlsafe(32)
        self._authority: Path | None = None
        if options.resources and not options.ray_address:
            raise StackError('resources: only a Ray cluster reserves them; set ray_address, or use --ray')
        self._placement = find_cluster(options.ray_address, options.resources) if options.ray_address else None
        self._host = open_host(self._placement, self._folder)
        self._spawner = Spawner(
            self._folder, report, host=self._host, restart_limit=_START_RESTARTS, on_restart=self._save
        )
        # Trainer and samplers must load the same model, so both get the patches and the dtype.
        self._patches = {'patches': dict(options.patches)} if options.patches else {}
        was_started = self._spawner.config_path('model').exists()
        earlier = self._spawner.settings_of('model') if was_started else None
        self._dtype = dtype_of(options, earlier=earlier)
        # Ray assigns the GPUs of a cluster.
        gpus = () if self._placement else usable_gpus()
        self._shares = divided(gpus, gpu_needs(options, earlier=earlier))

    def run(self) -> StackState:
        """Start all services, record the stack and return it.

        Raises:
            StackError: A service did not start; the message contains the cause.
        """
        options, spawner = self._options, self._spawner
        # A start that was killed may have left processes that it had not recorded yet.
        self._host.end_unrecorded()
        # The ports are chosen here, so that they stay the same when the gateway is restarted.
        gateway = self._fixed(options.listen)
        http = self._fixed(options.http_listen) if options.http_listen else ''
        self._authority = renewed_certificates(self._folder / 'tls', gateway) if options.tls else None
        # With TLS, services use a separate port that requires client certificates.
        internal = self._fixed(FREE_PORT) if options.tls else ''
        self._start('checkpoint', {'base_models': list(options.base_models)})
        self._start('data', {'base_models': list(options.base_models)})
        addresses = {f'{name}_address': spawner.wait_for(name) for name in ('checkpoint', 'data')}
        for number in range(options.trainer_count):
            for base_model in options.base_models:
                self._start_trainer(base_model, number, addresses)
        if self._shares:
            # vLLM measures the free memory of a GPU while it starts, so trainers load their models first.
            self._wait_for_trainers()
        for base_model in options.base_models:
            self._start_samplers(base_model, addresses, gateway=internal or self._on_all_machines(gateway))
        self._wait_for_trainers()
        self._start('gateway', {**self._gateway_settings(gateway, http), 'internal_listen': internal})
        for name in spawner.started:
            if name not in spawner.addresses:
                spawner.wait_for(name)
        state = self._save(http_address=read_address(spawner.address_file('gateway-http')))
        wait_for_fleet(state, spawner)
        return state

    def _fixed(self, listen: str) -> str:
        """Return an address of this machine with a port that is known before the service starts.

        Raises:
            StackError: Other machines of the cluster cannot reach the address, which is on loopback.
        """
        if self._placement and listen != FREE_PORT and listen.startswith(('127.', 'localhost:', '[::1]')):
            raise StackError(f'listen: other machines cannot reach {listen}; use 0.0.0.0 as the host')
        return with_port(f'{self._host.address}:0' if listen == FREE_PORT else listen)

    def _on_all_machines(self, listen: str) -> str:
        """Return the address at which all processes of the stack can reach a listener on this machine."""
        return listen if reachable(listen) == listen else f'{self._host.address}:{listen.rpartition(":")[2]}'

    def _wait_for_trainers(self) -> None:
        for name in self._spawner.started:
            if service_of(name) == 'model' and name not in self._spawner.addresses:
                self._spawner.wait_for(name)

    def _start_trainer(self, base_model: str, number: int, addresses: Mapping[str, str]) -> None:
        """Start one of the model services of a base model; `number` counts from 0."""
        options = self._options
        processes = len(options.base_models) * options.trainer_count * mesh_size(options.services.get('model', {}))
        model = {'base_model': base_model, 'dtype': self._dtype, **addresses, **self._patches}
        model = {**model, 'thread_count': threads_of_each(processes, os.environ)}
        model = {**model, 'full_parameters': True} if options.full_parameters else model
        # A process that reserves a GPU of a cluster uses this GPU.
        model = {**model, 'device': 'cuda'} if self._has_gpu('model') else model
        if share := self._shares.get(trainer_name(self._options, base_model, number)):
            model = {**model, **share.trainer_settings}
        peers = self._trainer_folders(base_model)
        model = {**model, 'peer_trainers': peers} if len(peers) > 1 else model
        self._start(trainer_name(self._options, base_model, number), model)

    def _trainer_folders(self, base_model: str) -> dict[str, str]:
        """Return the state folders of a base model's model services (trainers) by name.

        Trainers of an earlier start with more trainers are included, so that an operator can move their runs.
        """
        names = (trainer_name(self._options, base_model, number) for number in itertools.count())
        folders = ((name, _data_folder(self._folder, name)) for name in names)
        started = itertools.islice(folders, self._options.trainer_count)
        earlier = itertools.takewhile(lambda item: item[1].exists(), folders)
        return {name: str(folder) for name, folder in itertools.chain(started, earlier)}

    def _start_samplers(self, base_model: str, addresses: Mapping[str, str], *, gateway: str) -> None:
        """Start the samplers of one base model."""
        options, index = self._options, self._options.base_models.index(base_model)
        shared = {'base_model': base_model, 'checkpoint_address': addresses['checkpoint_address']}
        sampler = {**shared, 'engine': options.engine_of(base_model), 'gateways': [gateway]}
        torch = {'dtype': self._dtype, **self._patches, **({'device': 'cuda'} if self._has_gpu('sampler') else {})}
        # The torch engine keeps one thread, so that its results do not depend on other requests.
        threads = threads_of_each(len(options.base_models) * max(1, options.sampler_count), os.environ)
        vllm = {'engine_args': {'dtype': self._dtype}, 'thread_count': threads}
        sampler = {**sampler, 'torch': torch, 'vllm': vllm}
        if index == 0:
            # Samplers that are added later use this configuration, even if the stack starts without samplers.
            template = self._shares.get('sampler')
            self._spawner.configure(
                'sampler', self._settings('sampler', with_gpus(sampler, template) if template else sampler)
            )
        for number in range(index * options.sampler_count, (index + 1) * options.sampler_count):
            name = numbered('sampler', number + 1)
            share = self._shares.get(name)
            self._start(name, with_gpus(sampler, share) if share else sampler)
            if share:
                # vLLM also expects that no other process on its GPU allocates memory while it starts.
                self._spawner.wait_for(name)

    def _has_gpu(self, service: str) -> bool:
        return self._placement is not None and bool(self._placement.resources[service].get('GPU'))

    def current_state(self, *, http_address: str = '') -> StackState:
        """Return the record of the started services; a stack is up once its record has the gateway's address."""
        started = [self._spawner.state_of(name) for name in self._spawner.started]
        services = tuple(sorted(started, key=lambda item: (SERVICES.index(service_of(item.name)), item.name)))
        state = StackState.create(
            self._folder,
            base_model=self._options.base_model,
            services=services,
            http_address=http_address,
            more_models=self._options.more_models,
            ca=str(self._authority or ''),
        )
        return replace(state, placement=self._placement)

    def _gateway_settings(self, listen: str, http_listen: str) -> dict[str, Any]:
        addresses, http_file = self._spawner.addresses, self._spawner.address_file('gateway-http')
        http_file.unlink(missing_ok=True)
        return {
            'listen': listen,
            'http_listen': http_listen,
            'http_address_file': str(http_file),
            'upstreams': {
                'models': [addresses[name] for name in sorted(self._spawner.started) if service_of(name) == 'model'],
                **{name: addresses[name] for name in ('data', 'checkpoint')},
            },
            'bootstrap_key': self._api_key(),
            'tokenizers': _tokenizers(self._options.base_models),
        }

    def _start(self, name: str, settings: Mapping[str, Any]) -> None:
        self._spawner.configure(name, self._settings(name, settings))
        self._spawner.spawn(name)
        # The process is recorded immediately, so that it can be found if this program is killed.
        self._save()

    def _save(self, *, http_address: str = '') -> StackState:
        state = self.current_state(http_address=http_address)
        state.save()
        return state

    def _settings(self, name: str, settings: Mapping[str, Any]) -> dict[str, Any]:
        own = dict(self._options.services.get(service_of(name), {}))
        if self._placement and 'listen' in own and service_of(name) != 'gateway':
            raise StackError(f'{service_of(name)}.listen: the cluster chooses the machine, so leave the address out')
        telemetry = {'trace_dir': str(self._folder / 'traces'), **own.pop('telemetry', {})}
        for engine in ('torch', 'vllm'):
            if engine in settings and engine in own:
                own[engine] = with_defaults(settings[engine], own[engine])
        return {
            'listen': FREE_PORT,
            **service_paths(self._folder, self._spawner, name),
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


def service_paths(folder: Path, spawner: Spawner, name: str) -> dict[str, str]:
    """Return the configured paths of a process."""
    return {'state_dir': str(_data_folder(folder, name)), 'address_file': str(spawner.address_file(name))}


def _data_folder(folder: Path, name: str) -> Path:
    return folder / 'data' / name


def numbered(service: str, number: int) -> str:
    """Return the name of a service's process, such as 'sampler' for number 1 and 'sampler-2' for number 2."""
    return service if number == 1 else f'{service}-{number}'


def wait_for_fleet(state: StackState, spawner: Spawner, waiting: Collection[str] = ()) -> None:
    """Wait until the running samplers of a stack have joined the fleet, except samplers named in `waiting`."""
    running = [item for item in state.services if item.is_restarted and item.name not in waiting]
    samplers = {item.address for item in running if service_of(item.name) == 'sampler'}
    wait_until_joined(
        reachable(state.address), state.read_api_key(), samplers, check=spawner.check_running, ca=state.ca
    )


def dtype_of(options: StackOptions, *, earlier: Mapping[str, Any] | None) -> str:
    """Return the data type of the base models, which model services and samplers share.

    Args:
        options: Options of the stack.
        earlier: Configuration of the model service at the last start of this stack; None at the first start.
    """
    own = options.services.get('model', {})
    if (given := own.get('dtype', options.dtype)) != 'auto':
        return given
    if options.full_parameters or own.get('full_parameters'):
        # Full-parameter training changes the base model itself.
        return 'float32'
    # The adapters of a stack need the type with which they were trained. Earlier versions set no type.
    return 'auto' if earlier is None else earlier.get('dtype', 'float32')


def trainer_name(options: StackOptions, base_model: str, number: int) -> str:
    """Return the name of one of the model services of a base model; `number` counts from 0."""
    # State folders have the same names, so the names must not depend on the numbers of base models and of trainers.
    first = numbered('model', options.base_models.index(base_model) + 1)
    return f'{first}-trainer-{number + 1}' if number else first


def gpu_needs(options: StackOptions, *, earlier: Mapping[str, Any] | None = None) -> dict[str, GpuNeed]:
    """Return the GPUs that each process needs, without processes that run on another device.

    Args:
        options: Options of the stack.
        earlier: Configuration of the model service at the last start of this stack. Model services that trained on the
            CPU stay there, because the type of their weights may depend on the device.
    """
    model, sampler = options.services.get('model', {}), options.services.get('sampler', {})
    needs: dict[str, GpuNeed] = {}
    was_on_cpu = earlier is not None and not str(earlier.get('device', 'cpu')).startswith('cuda')
    if model.get('device', 'cpu' if was_on_cpu and 'gpus' not in model else 'cuda') == 'cuda':
        need = GpuNeed(mesh_size(model), tuple(model.get('gpus', ())))
        names = itertools.product(range(options.trainer_count), options.base_models)
        needs = {trainer_name(options, name, number): need for number, name in names}
    sizes: Mapping[str, Any] = sampler.get('vllm', {}).get('engine_args', {})
    size = math.prod(int(sizes.get(f'{axis}_parallel_size', 1)) for axis in ('tensor', 'pipeline', 'data'))
    for index, base_model in enumerate(options.base_models):
        engine = options.engine_of(base_model)
        if not can_sample_on_gpu(engine) or (engine == 'torch' and _torch_device(sampler) != 'cuda'):
            continue
        # Without samplers at the start, memory is reserved for a sampler that is added later.
        first, count = index * options.sampler_count, options.sampler_count or int(index == 0)
        for number in range(first, first + count):
            need = GpuNeed(size if engine == 'vllm' else 1, tuple(sampler.get('gpus', ())))
            needs[numbered('sampler', number + 1)] = need
    return needs


def _torch_device(sampler: Mapping[str, Any]) -> str:
    return sampler.get('torch', {}).get('device', 'cuda')


def threads_of_each(process_count: int, environment: Mapping[str, str]) -> int:
    """Return the number of threads of each of several equal processes: OMP_NUM_THREADS, or a share of all cores.

    Trainers and samplers each get all cores, because often only one process has work. Their waiting threads sleep
    (`hosts.start_child`), so both together are as fast as with half of the cores each (docs/LOG.md).
    """
    if (given := environment.get('OMP_NUM_THREADS', '')).isdecimal():
        return max(1, int(given))
    return max(1, _core_count() // process_count)


def _core_count() -> int:
    """Return the number of cores that this process may use, within the quota of its container."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    try:
        quota, period = Path('/sys/fs/cgroup/cpu.max').read_text().split()
        return cores if quota == 'max' else min(cores, math.ceil(int(quota) / int(period)))
    except (OSError, ValueError):
        return cores


def _tokenizers(base_models: Sequence[str]) -> dict[str, str]:
    """Return the hub id of each base model, without the hub's prefix, so that clients can load its tokenizer.

    Base models in local folders are left out.
    """
    # The dependencies of `twinkle.hub` are installed with the services, not with the client alone.
    hub = importlib.import_module('twinkle.hub')
    pairs = [(name, base_model_id(hub.without_alias(name))) for name in base_models]
    return {name: hub.HubId.parse(target).name for name, target in pairs if hub.local_path(target) is None}
