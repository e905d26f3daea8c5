"""`twinkle up`, `status`, `down`."""

import signal
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.server.v1 import server_service_pb2
from twinkle_client.cli.models import fetch
from twinkle_client.cli.session import StateDirOption, console, fail
from twinkle_client.client import TwinkleClient
from twinkle_client.errors import Error
from twinkle_client.stack import (
    StackBusyError,
    StackError,
    StackOptions,
    StackState,
    default_state_dir,
    revive_stack,
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


def up(
    config: Annotated[
        Path | None,
        typer.Option('--config', help='YAML file: base_model, listen, and fields for each service.', exists=True),
    ] = None,
    model: Annotated[str, typer.Option('--model', help='Hub id, built-in name or folder of the base model.')] = '',
    state_dir: StateDirOption = None,
    detach: Annotated[bool, typer.Option('--detach', help='Return once all serve.')] = False,
) -> None:
    """Start the five services on this machine, keep them up, and stop them on Ctrl-C."""
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _interrupt)
    folder = (state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    if state is not None and state.is_running():
        console.print('already up')
        _print_address(state)
        return
    try:
        options = StackOptions(state_dir=folder)
        options = options.with_file(config) if config else options
        options = replace(options, base_model=model) if model else options
        fetch(options.base_model)
        state = start_stack(options, report=_StartReport())
        _print_address(state)
        if not detach:
            _stay(folder)
    except (StackError, ValueError, OSError) as error:
        fail(str(error))
    except KeyboardInterrupt:
        console.print('\nstopping')
        stop_stack(folder, report=_StartReport())


def status(state_dir: StateDirOption = None) -> None:
    """Show the local stack's services."""
    folder = (state_dir or default_state_dir()).absolute()
    state = StackState.load(folder)
    if state is None:
        fail(f'no stack in {folder}; start one with `twinkle up`')
    described = {service.service: service for service in _server_info(state)}
    table = Table(title=f'{state.base_model} at {state.address or "(not up)"}')
    for name in ('service', 'state', 'pid', 'memory', 'address', 'version'):
        table.add_column(name, justify='right' if name in {'pid', 'memory'} else 'left')
    for service in state.services:
        info = described.get(service.name)
        health = 'serving' if info is not None and info.is_reachable else 'not answering'
        table.add_row(
            service.name,
            health if service.is_running() else 'not running',
            str(service.pid),
            f'{resident_bytes(service.pid) / 2**20:.0f} MiB' if service.is_running() else '',
            service.address,
            info.version if info is not None else '',
        )
    console.print(table)
    for base_model in differently_patched(described.values()):
        console.print(f'[red]{base_model}: trainer and sampler load it with different patches[/red]')
    if not all(item is not None and item.is_reachable for item in map(described.get, _names(state))):
        raise typer.Exit(1)


def down(state_dir: StateDirOption = None) -> None:
    """Stop the local stack."""
    folder = (state_dir or default_state_dir()).absolute()
    try:
        if not stop_stack(folder, report=_StartReport()):
            console.print(f'no stack in {folder}')
    except StackError as error:
        fail(str(error))


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


def _names(state: StackState) -> list[str]:
    return [service.name for service in state.services]


def _server_info(state: StackState) -> list[server_service_pb2.ServiceInfo]:
    if not state.is_running():
        return []
    client = TwinkleClient(state.address, state.read_api_key(), retry_timeout=timedelta(0))
    try:
        return list(client.get_server_info().services)
    except Error:
        return []
    finally:
        client.close()


def _print_address(state: StackState) -> None:
    console.print(f'\n[bold]{state.base_model}[/bold] is served at [bold]{state.address}[/bold]')
    console.print(f'API key: {state.read_api_key()}', highlight=False, soft_wrap=True)
    console.print(f'state, logs and traces: {state.state_dir}', highlight=False, soft_wrap=True)
    console.print("try:     twinkle sample 'Who are you?'", highlight=False)


def _stay(folder: Path) -> None:
    """Keep the services up until an interrupt or `twinkle down`; where they keep ending, stop."""
    console.print('\nCtrl-C stops it')
    report, ends = _StartReport(), deque[float](maxlen=_MOST_ENDS)
    while (state := StackState.load(folder)) is not None:
        ended = next((service.name for service in state.services if not service.is_running()), '')
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
