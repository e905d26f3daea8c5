"""`twinkle up`, `status`, `down`."""

import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer
from rich.table import Table

from twinkle.api.server.v1 import server_service_pb2
from twinkle_client.cli.models import fetch
from twinkle_client.cli.planning import warn_of_memory
from twinkle_client.cli.session import LocalStateDirOption, console, error_console, fail, told_on_interrupt
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import Error
from twinkle_client.stack import (
    DEFAULT_MODEL,
    ServiceState,
    StackBusyError,
    StackError,
    StackOptions,
    StackState,
    default_state_dir,
    revive_stack,
    service_of,
    start_stack,
    stop_stack,
)
from twinkle_client.stack.processes import resident_bytes

_WATCH_SECONDS = 0.5
_MOST_ENDS = 5
_ENDS_SECONDS = 300.0
"""More ends of services within this time are no accident."""


class _StartReport:
    """Prints when each service is ready, and how long it took."""

    def __init__(self) -> None:
        self._begin: dict[str, float] = {}

    def __call__(self, service: str, event: str) -> None:
        if event == 'starting':
            self._begin[service] = time.monotonic()
        elif event == 'ready':
            console.print(f'  {service:<11} ready after {time.monotonic() - self._begin[service]:.1f} s')
        elif event == 'ended':
            console.print(f'  {service:<11} ended by itself; starting it again')
        elif event == 'stopped':
            console.print(f'  {service:<11} stopped')


@dataclass(frozen=True, kw_only=True)
class UpOptions:
    """What `twinkle up` is told."""

    config: Annotated[
        Path | None,
        typer.Option('--config', help='YAML file: base_model, listen, and fields for each service.', exists=True),
    ] = None
    models: Annotated[
        list[str] | None,
        typer.Option('--model', help='Hub id, built-in name or folder of a base model. Repeat for further ones.'),
    ] = None
    samplers: Annotated[
        int | None, typer.Option('--samplers', min=0, max=64, help='Samplers of each base model. Unset: 1.')
    ] = None
    engine: Annotated[str, typer.Option('--engine', help='What samples: auto, torch or vllm. Unset: auto.')] = ''
    tls: Annotated[bool, typer.Option('--tls', help='Encrypt, with certificates made in the state folder.')] = False
    state_dir: LocalStateDirOption = None
    detach: Annotated[bool, typer.Option('--detach', help='Return once all serve.')] = False

    def choices(self) -> dict[str, Any]:
        """Return the fields of `StackOptions` that were chosen."""
        models = [_everywhere(model) for model in self.models or []]
        chosen: dict[str, Any] = {
            'base_model': models[0] if models else None,
            'more_models': tuple(models[1:]) if models else None,
            'sampler_count': self.samplers,
            'engine': self.engine or None,
            'tls': self.tls or None,
        }
        return {name: value for name, value in chosen.items() if value is not None}


def up(given: UpOptions) -> None:
    """Start the five services on this machine, keep them up, and stop them on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = (given.state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    choices = given.choices()
    try:
        options = StackOptions(state_dir=folder)
        options = replace(options.with_file(given.config) if given.config else options, **choices)
        if state is not None and state.is_reachable():
            _mend(state, options, is_told=bool(given.config or choices))
        else:
            _run(options, is_detached=given.detach)
    except (StackError, ValueError, OSError) as error:
        fail(str(error))


def status(state_dir: LocalStateDirOption = None) -> None:
    """Show the local stack's services."""
    folder = (state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    if state is None:
        fail(f'no stack in {folder}; start one with `twinkle up`')
    with error_console.status('asking the services'):
        described = _by_name(_server_info(state))
    table = Table(title=f'{", ".join(state.base_models)} at {state.address or "(not up)"}')
    own_columns = ['base model'] if state.more_models else []
    for name in ('service', 'state', 'pid', 'memory', 'address', 'version', *own_columns):
        table.add_column(name, justify='right' if name in {'pid', 'memory'} else 'left')
    for service in state.services:
        if service.is_leaving and not service.is_running():
            continue
        info = described.get(service.name) or described.get(service_of(service.name))
        table.add_row(
            service.name,
            _standing(service, info),
            str(service.pid),
            f'{resident_bytes(service.pid) / 2**20:.0f} MiB' if service.is_running() else '',
            service.address,
            info.version if info is not None else '',
            *[service.base_model for _ in own_columns],
        )
    console.print(table)
    for base_model in differently_patched(described.values()):
        console.print(f'[red]{base_model}: trainer and sampler load it with different patches[/red]')
    if not all(item is not None and item.is_reachable for item in map(described.get, _described_names(state))):
        raise typer.Exit(1)


def down(state_dir: LocalStateDirOption = None) -> None:
    """Stop the local stack."""
    folder = (state_dir or default_state_dir()).absolute()
    if not _stop(folder):
        console.print(f'no stack in {folder}', highlight=False, soft_wrap=True)


def differently_patched(services: Iterable[server_service_pb2.ServiceInfo]) -> list[str]:
    """Return the base models that are not the same model in every service that holds them."""
    seen: dict[str, list[bytes]] = {}
    for service in services:
        if service.service == 'gateway':
            continue
        for model in service.base_models:
            patches = [patch.SerializeToString(deterministic=True) for patch in model.patches]
            seen.setdefault(model.base_model, []).append(b'\0'.join(patches))
    return sorted(name for name, kinds in seen.items() if len(set(kinds)) > 1)


def _standing(service: ServiceState, info: server_service_pb2.ServiceInfo | None) -> str:
    if not service.is_running():
        return 'not running'
    if service.is_leaving:
        return 'leaving'
    return 'serving' if info is not None and info.is_reachable else 'not answering'


def _by_name(services: Iterable[server_service_pb2.ServiceInfo]) -> dict[str, server_service_pb2.ServiceInfo]:
    """Return what services say of themselves; one of a kind that comes again is called as the stack calls it."""
    found: dict[str, server_service_pb2.ServiceInfo] = {}
    for service in services:
        count = sum(service_of(name) == service.service for name in found)
        found[f'{service.service}-{count + 1}' if count else service.service] = service
    return found


def _described_names(state: StackState) -> set[str]:
    """Return the names of the services that describe themselves each: samplers do it together."""
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
        console.print(f'OpenAI clients: {state.http_url}/v1', highlight=False, soft_wrap=True)
    if state.ca:
        console.print(f'its authority: {state.ca}, for TWINKLE_CA and SSL_CERT_FILE', highlight=False, soft_wrap=True)
    console.print(f'API key: {state.read_api_key()}', highlight=False, soft_wrap=True)
    console.print(f'state, logs and traces: {state.state_dir}', highlight=False, soft_wrap=True)
    where = '' if state.state_dir == default_state_dir().absolute() else f' --state-dir {state.state_dir}'
    console.print(f"try:     twinkle sample 'Who are you?'{where}", highlight=False, soft_wrap=True)


def _mend(state: StackState, options: StackOptions, *, is_told: bool) -> None:
    """Say where a stack is that runs already, and start again what ended of it."""
    console.print('already up')
    if is_told and options.base_models != state.base_models:
        served, wanted = ', '.join(state.base_models), ', '.join(options.base_models)
        fail(f'{served} is served there, not {wanted}; stop it first: `twinkle down`')
    if is_told:
        console.print('its options are those of its start; `twinkle fleet add` adds a sampler', soft_wrap=True)
    with console.status('looking after its services'):
        state = revive_stack(state.state_dir, report=_StartReport()) or state
    _print_address(state)


def _everywhere(model: str) -> str:
    """Return a model's name as services understand it, which run in another folder."""
    path = Path(model)
    is_here = model not in {'', DEFAULT_MODEL} and (path / 'config.json').is_file()
    return str(path.absolute()) if is_here else model


def _run(options: StackOptions, *, is_detached: bool) -> None:
    """Start a stack and stay with it, unless it is to be left alone; an interrupt stops it."""
    try:
        folders = [fetch(base_model) for base_model in options.base_models]
        warn_of_memory(folders, copies=1 + options.sampler_count)
        with console.status('the services start; the model has to be loaded'):
            state = start_stack(options, report=_StartReport())
        _print_address(state)
        if not is_detached:
            _stay(options.state_dir)
    except KeyboardInterrupt:
        console.print('\nstopping')
        _stop(options.state_dir)


def _stop(folder: Path) -> bool:
    """Stop what runs in a folder; return whether there was a stack."""
    left = 'not all were stopped yet; `twinkle down` stops the rest'
    try:
        with told_on_interrupt(left), console.status('the services finish what they have'):
            return stop_stack(folder, report=_StartReport())
    except StackError as error:
        fail(str(error))


def _stay(folder: Path) -> None:
    """Keep the services up until an interrupt or `twinkle down`; where they keep ending, stop."""
    console.print('\nCtrl-C stops it')
    report, ends = _StartReport(), deque[float](maxlen=_MOST_ENDS)
    while (state := StackState.load(folder)) is not None:
        ended = next((service.name for service in state.ended()), '')
        if ended and len(ends) == _MOST_ENDS and time.monotonic() - ends[0] < _ENDS_SECONDS:
            stop_stack(folder, report=report)
            raise StackError(f'{ended} keeps ending by itself; its log is {folder / "logs" / ended}.log')
        if ended:
            _revive(folder, ends, report)
        time.sleep(_WATCH_SECONDS)
    console.print('stopped')


def _revive(folder: Path, ends: deque[float], report: _StartReport) -> None:
    try:
        revive_stack(folder, report=report)
    except StackBusyError:
        return
    except StackError as error:
        console.print(str(error), markup=False, highlight=False)
    ends.append(time.monotonic())


def _interrupt(number: int, frame: FrameType | None) -> None:
    del number, frame
    raise KeyboardInterrupt
