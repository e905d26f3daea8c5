"""`twinkle up`, `status` and `down`: the services of a stack."""

from collections.abc import Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.table import Table

from twinkle.api.server.v1 import server_service_pb2
from twinkle_client.cli.autoscaling import Autoscaler
from twinkle_client.cli.console import print_console_link
from twinkle_client.cli.models import fetch
from twinkle_client.cli.planning import warn_of_memory
from twinkle_client.cli.restarts import StartReport, keep_running, print_plain
from twinkle_client.cli.session import (
    JsonOption,
    LocalStateDirOption,
    console,
    error_console,
    exit_on_interrupt,
    fail,
    interrupt_on_termination,
    print_json,
    print_table,
)
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import Error
from twinkle_client.stack import (
    DEFAULT_MODEL,
    ServiceState,
    StackError,
    StackOptions,
    StackState,
    default_state_dir,
    revive_stack,
    service_of,
    start_stack,
    stop_stack,
)
from twinkle_client.stack.packages import check_packages
from twinkle_client.stack.scaling_rule import Scaling
from twinkle_client.stack.spawning import mesh_size


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """Options of `twinkle up`."""

    config: Annotated[
        Path | None,
        typer.Option('--config', help='YAML file with base_model, listen, and settings of each service.', exists=True),
    ] = None
    models: Annotated[
        list[str] | None,
        typer.Option('--model', help='Hub id, built-in name or folder of a base model. Repeatable.'),
    ] = None
    trainers: Annotated[
        int | None, typer.Option('--trainers', min=1, max=64, help='Model services per base model. Default: 1.')
    ] = None
    samplers: Annotated[
        int | None, typer.Option('--samplers', min=0, max=64, help='Samplers per base model. Default: 1.')
    ] = None
    max_samplers: Annotated[
        int | None,
        typer.Option('--max-samplers', min=1, max=64, help='Add samplers while requests wait; maximum per model.'),
    ] = None
    engine: Annotated[str, typer.Option('--engine', help='Sampler engine: auto, torch or vllm. Default: auto.')] = ''
    dtype: Annotated[
        str,
        typer.Option('--dtype', help='Data type of base models: auto, float32, bfloat16, float16. Default: auto.'),
    ] = ''
    port: Annotated[
        int | None, typer.Option('--port', min=0, max=65535, help='gRPC port of the gateway. Default: a free port.')
    ] = None
    http_port: Annotated[
        int | None,
        typer.Option('--http-port', min=0, max=65535, help='HTTP port of the gateway. Default: a free port.'),
    ] = None
    tls: Annotated[bool, typer.Option('--tls', help='Use TLS, with certificates created in the state folder.')] = False
    full_parameters: Annotated[
        bool, typer.Option('--full-parameters', help='Allow full-parameter runs, which lease the model service.')
    ] = False
    ray: Annotated[
        bool, typer.Option('--ray', help='Run the services on a Ray cluster, which shares the state folder.')
    ] = False
    address: Annotated[
        str, typer.Option('--address', help='Ray cluster for --ray, host:port. Default: auto, the running cluster.')
    ] = ''
    state_dir: LocalStateDirOption = None
    detach: Annotated[bool, typer.Option('--detach', help='Run in the background, without restarts.')] = False

    def choices(self, configured: StackOptions) -> dict[str, Any]:
        """Return the fields of `StackOptions` given on the command line.

        Args:
            configured: Options of the configuration file; `--max-samplers` replaces only the maximum of `autoscaling`,
                and ports replace the ports of `listen` and `http_listen`.
        """
        scaling = configured.autoscaling
        models = [_absolute_model(model) for model in self.models or []]
        chosen: dict[str, Any] = {
            'base_model': models[0] if models else None,
            'more_models': tuple(models[1:]) if models else None,
            'trainer_count': self.trainers,
            'sampler_count': self.samplers,
            'engine': self.engine or None,
            'dtype': self.dtype or None,
            'listen': _with_port(configured.listen, self.port),
            'http_listen': _with_port(configured.http_listen, self.http_port),
            'tls': self.tls or None,
            'full_parameters': self.full_parameters or None,
            'autoscaling': self.max_samplers
            and replace(scaling or Scaling(max_samplers=1), max_samplers=self.max_samplers),
            'ray_address': (self.address or 'auto') if self.ray else None,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def up(given: UpOptions) -> None:
    """Start the services on this machine or a Ray cluster, restart them if they exit, and stop them on Ctrl-C."""
    if given.address and not given.ray:
        fail('--address is the address of a Ray cluster; add --ray')
    interrupt_on_termination()
    folder = (given.state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    try:
        check_packages()
        options = StackOptions(state_dir=folder)
        options = options.with_file(given.config) if given.config else options
        choices = given.choices(options)
        options = replace(options, **choices)
        if state is not None and state.is_reachable():
            _repair(state, options, has_choices=bool(given.config or choices))
        else:
            _run(options, is_detached=given.detach)
    except (StackError, ValueError, OSError) as error:
        fail(str(error))


def status(is_json: JsonOption = False, state_dir: LocalStateDirOption = None) -> None:
    """Show the services of the local stack.

    Exits with status 1 unless all services are serving.
    """
    folder = (state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    if state is None:
        fail(f'no stack in {folder}; start one with `twinkle up`')
    with error_console.status('querying the services'):
        described = _by_name(_server_info(state), state)
    if is_json:
        print_json(_status_json(state, described))
    else:
        _print_status(state, described)
    if not all(item is not None and item.is_reachable for item in map(described.get, _described_names(state))):
        raise typer.Exit(1)


def _print_status(state: StackState, described: Mapping[str, server_service_pb2.ServiceInfo]) -> None:
    own_columns = ['base model'] if state.more_models else []
    title = f'{", ".join(state.base_models)} at {state.address or "(not up)"}'
    columns = ('state', 'pid', 'memory', 'address', 'version', *own_columns)
    table = Table('service', *columns, title=title)
    for column in table.columns[2:4]:
        column.justify = 'right'
    for service in state.services:
        if service.is_leaving and not service.is_running():
            continue
        row = _service_json(service, described)
        memory = f'{row["resident_bytes"] / 2**20:.0f} MiB' if row['resident_bytes'] else ''
        cells = (row['state'], str(service.pid), memory, service.address, row['version'])
        table.add_row(service.name, *cells, *[service.base_model for _ in own_columns])
    print_table(table)
    for base_model in differently_patched(described.values()):
        console.print(f'[red]{base_model}: model services and samplers apply different patches[/red]', soft_wrap=True)


def _status_json(state: StackState, described: Mapping[str, server_service_pb2.ServiceInfo]) -> dict[str, Any]:
    return {
        'url': state.url,
        'http_url': state.http_url,
        'base_models': state.base_models,
        'services': [_service_json(service, described) for service in state.services],
        'differently_patched': differently_patched(described.values()),
    }


def _service_json(service: ServiceState, described: Mapping[str, server_service_pb2.ServiceInfo]) -> dict[str, Any]:
    info = described.get(service.name) or described.get(service_of(service.name))
    return {
        'name': service.name,
        'state': _state_text(service, info),
        'pid': service.pid,
        'resident_bytes': service.process.resident_bytes() if service.is_running() else 0,
        'address': service.address,
        'version': info.version if info is not None else '',
        'base_model': service.base_model,
        'log_path': service.log_path,
    }


def down(state_dir: LocalStateDirOption = None) -> None:
    """Stop the local stack."""
    folder = (state_dir or default_state_dir()).absolute()
    if not _stop(folder):
        console.print(f'no stack is running in {folder}', highlight=False, soft_wrap=True)


def differently_patched(services: Iterable[server_service_pb2.ServiceInfo]) -> list[str]:
    """Return the base models that are loaded with different patches by different services."""
    seen: dict[str, list[bytes]] = {}
    for service in services:
        if service.service == 'gateway':
            continue
        for model in service.base_models:
            patches = [patch.SerializeToString(deterministic=True) for patch in model.patches]
            seen.setdefault(model.base_model, []).append(b'\0'.join(patches))
    return sorted(name for name, kinds in seen.items() if len(set(kinds)) > 1)


def _state_text(service: ServiceState, info: server_service_pb2.ServiceInfo | None) -> str:
    if not service.is_running():
        return 'not running'
    if service.is_leaving:
        return 'leaving'
    return 'serving' if info is not None and info.is_reachable else 'not responding'


def _by_name(
    services: Iterable[server_service_pb2.ServiceInfo], state: StackState
) -> dict[str, server_service_pb2.ServiceInfo]:
    """Return the service reports by process name; model services report in the order of their names."""
    trainers = iter([service.name for service in state.services if service_of(service.name) == 'model'])
    return {next(trainers, 'model') if item.service == 'model' else item.service: item for item in services}


def _described_names(state: StackState) -> set[str]:
    """Return the process names that report separately; all samplers share one report."""
    kinds = {service_of(service.name) for service in state.services}
    return kinds | {service.name for service in state.services if service_of(service.name) == 'model'}


def _server_info(state: StackState) -> list[server_service_pb2.ServiceInfo]:
    if not state.is_reachable():
        return []
    client = TwinkleClient(state.url, state.read_api_key(), ca=state.ca, retry_timeout=timedelta(0))
    try:
        return list(client.get_server_info().services)
    except Error:
        return []
    finally:
        client.close()


def _print_address(state: StackState) -> None:
    verb = 'are' if state.more_models else 'is'
    console.print(f'\n[bold]{", ".join(state.base_models)}[/bold] {verb} served at [bold]{state.url}[/bold]')
    if state.http_url:
        console.print(f'OpenAI API: {state.http_url}/v1', highlight=False, soft_wrap=True)
        print_console_link(state)
    if state.ca:
        console.print(f'CA certificate: {state.ca}, for TWINKLE_CA and SSL_CERT_FILE', highlight=False, soft_wrap=True)
    console.print(f'API key: {state.read_api_key()}', highlight=False, soft_wrap=True)
    console.print(f'State, logs and traces: {state.state_dir}', highlight=False, soft_wrap=True)
    option = '' if state.state_dir == default_state_dir().absolute() else f' --state-dir {state.state_dir}'
    console.print(f"Try it: twinkle sample 'Who are you?'{option}", highlight=False, soft_wrap=True)


def _repair(state: StackState, options: StackOptions, *, has_choices: bool) -> None:
    """Restart the exited services of a running stack, and print its address. Exit if the options change base models."""
    console.print('The stack is already running.')
    if has_choices and options.base_models != state.base_models:
        served, wanted = ', '.join(state.base_models), ', '.join(options.base_models)
        fail(f'the running stack serves {served}, not {wanted}; stop it first with `twinkle down`')
    if has_choices:
        console.print(
            'The options do not change a running stack; add samplers with `twinkle fleet add`.', soft_wrap=True
        )
    with console.status('checking the services'):
        state = revive_stack(state.state_dir, report=StartReport()) or state
    _print_address(state)


def _with_port(listen: str, port: int | None) -> str | None:
    """Return an address with another port, on loopback if the address is empty; None without a port."""
    host = listen.rpartition(':')[0] or '127.0.0.1'
    return None if port is None else f'{host}:{port}'


def _absolute_model(model: str) -> str:
    """Return a model folder as an absolute path, because services run in another folder; keep other names."""
    path = Path(model)
    is_here = model not in {'', DEFAULT_MODEL} and (path / 'config.json').is_file()
    return str(path.absolute()) if is_here else model


def _run(options: StackOptions, *, is_detached: bool) -> None:
    """Start a stack and, unless detached, keep it running until an interrupt stops it."""
    if is_detached and options.autoscaling is not None:
        fail('autoscaling is done by the running `twinkle up`, so it cannot be combined with --detach')
    scaling = options.autoscaling
    with ExitStack() as cleanup:
        try:
            folders = [fetch(base_model) for base_model in options.base_models]
            if not options.ray_address:
                samplers = scaling.max_samplers if scaling else options.sampler_count
                trainers = options.trainer_count * mesh_size(options.services.get('model', {}))
                warn_of_memory(folders, copies=trainers + samplers)
            with console.status('starting the services and loading the model'):
                state = start_stack(options, report=StartReport())
            _print_address(state)
            for trainer in _stopped_trainers(state):
                text = f'{trainer} of an earlier start is not running; see docs/gateways.md to move its runs'
                console.print(f'[yellow]{text}[/yellow]', soft_wrap=True)
            if scaling is not None:
                scaler = Autoscaler(state, scaling, report=StartReport(), say=print_plain)
                scaler.start()
                # A scaling change in progress ends soon after the stack is stopped.
                cleanup.callback(scaler.close)
            if not is_detached:
                keep_running(options.state_dir)
        except KeyboardInterrupt:
            console.print('\nStopping')
            _stop(options.state_dir)


def _stopped_trainers(state: StackState) -> list[str]:
    """Return the names of model services that have a journal in the state folder but are not part of the stack."""
    started = {service.name for service in state.services}
    folders = [path.parent.name for path in (state.state_dir / 'data').glob('model*-trainer-*/journal')]
    return sorted(name for name in folders if name not in started)


def _stop(folder: Path) -> bool:
    """Stop the stack in a folder; return whether there was a stack."""
    note = 'some services are still running; stop them with `twinkle down`'
    try:
        with exit_on_interrupt(note), console.status('stopping the services'):
            return stop_stack(folder, report=StartReport())
    except StackError as error:
        fail(str(error))
