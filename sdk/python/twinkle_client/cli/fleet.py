"""`twinkle fleet`: the replicas behind a gateway, one more of them, one less."""

import os
import sys
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle_client.cli.session import (
    LocalStateDirOption,
    StateDirOption,
    console,
    fail,
    open_client,
    told_on_interrupt,
)
from twinkle_client.errors import Error
from twinkle_client.fleet import STATES, FleetAdministration
from twinkle_client.stack import ENGINES, StackError, add_sampler, default_state_dir, leave_stack

app = typer.Typer(help='The replicas behind the gateway; shown where no command is given.', invoke_without_command=True)
TOKEN_VARIABLE = 'TWINKLE_SAMPLER_INTERNAL_TOKEN'  # noqa: S105 (a name, not a secret)
_NOT_ADDED = 'a sampler that did not serve yet is stopped, the others stay'
_DRAIN_POLL_SECONDS = 0.5
_DRAIN_LIMIT_SECONDS = 600.0


@app.callback()
def show(context: typer.Context, state_dir: StateDirOption = None) -> None:
    """Show every replica: how it stands, how busy it is, what it holds."""
    if context.invoked_subcommand is not None:
        # Given before the command or after it, the option means the same.
        context.default_map = {context.invoked_subcommand: {'state_dir': state_dir}}
        return
    with open_client(state_dir) as client:
        replicas = FleetAdministration(client=client).list_replicas()
    console.print(fleet_table(replicas, now=datetime.now(UTC)))


@app.command('add')
def add(
    count: Annotated[int, typer.Option('--count', min=1, max=64, help='How many, on this machine.')] = 1,
    engine: Annotated[str, typer.Option('--engine', help='torch or vllm. Unset: as the first sampler.')] = '',
    model: Annotated[str, typer.Option('--model', help='Which base model. Unset: the first of the stack.')] = '',
    state_dir: LocalStateDirOption = None,
) -> None:
    """Start samplers beside the local stack; each joins the fleet as soon as it serves."""
    if engine not in {'', *ENGINES[1:]}:
        fail(f'--engine must be torch or vllm, got {engine!r}')
    folder = (state_dir or default_state_dir()).absolute()
    for _ in range(count):
        begin = time.monotonic()
        try:
            with told_on_interrupt(_NOT_ADDED), console.status('a sampler loads the model'):
                added = add_sampler(folder, engine=engine, base_model=model, report=_silent)
        except (StackError, OSError) as error:
            fail(str(error))
        console.print(f'  {added.name:<11} {added.address}  ready after {time.monotonic() - begin:.1f} s')


@app.command('join')
def join(
    gateway: Annotated[str, typer.Argument(help='Address of the gateway, host:port.')],
    model: Annotated[str, typer.Option('--model', help='Base model, as the deployment names it.')],
    listen: Annotated[str, typer.Option('--listen', help='Where to serve; the gateway has to reach it.')],
    engine: Annotated[str, typer.Option('--engine', help='torch or vllm.')] = 'vllm',
    checkpoint: Annotated[
        str, typer.Option('--checkpoint', help='Address of the checkpoint service. Unset: the gateway tells it.')
    ] = '',
) -> None:
    """Run a sampler of this host in the foreground and join the fleet of a gateway elsewhere.

    The deployment's internal token is read from TWINKLE_SAMPLER_INTERNAL_TOKEN. Ctrl-C drains and leaves.
    """
    if engine not in ENGINES[1:]:
        fail(f'--engine must be torch or vllm, got {engine!r}')
    if not os.environ.get(TOKEN_VARIABLE):
        fail(f'set {TOKEN_VARIABLE} to the internal token of the deployment')
    settings = {
        'base_model': model,
        'gateways': f'[{gateway}]',
        'listen': listen,
        'engine': engine,
        'checkpoint_address': checkpoint,
    }
    words = [word for name, value in settings.items() if value for word in ('--set', f'{name}={value}')]
    # The sampler takes this process's place, so that signals reach it as they would reach any service.
    os.execv(sys.executable, [sys.executable, '-m', 'services.sampler', *words])  # noqa: S606 (no shell is wanted)


@app.command('drain')
def drain(
    replica_id: Annotated[str, typer.Argument(help='As `twinkle fleet` shows it.')],
    state_dir: StateDirOption = None,
) -> None:
    """Ask a replica to finish what it has and to leave, and wait until it has."""
    with open_client(state_dir) as client:
        fleet = FleetAdministration(client=client)
        _drain(fleet, replica_id, state_dir)
        with told_on_interrupt(f'{replica_id} goes on draining'):
            _wait_until_gone(fleet, replica_id)
    console.print(f'{replica_id} has left', highlight=False)


def _wait_until_gone(fleet: FleetAdministration, replica_id: str) -> None:
    end = time.monotonic() + _DRAIN_LIMIT_SECONDS
    with console.status(f'{replica_id} finishes its sequences') as status:
        while (left := _find(fleet, replica_id)) is not None and left.state != pb.REPLICA_STATE_LOST:
            if time.monotonic() > end:
                fail(f'{replica_id} still has {left.load.running_sequence_count} sequences; it goes on draining')
            status.update(f'{replica_id} has {left.load.running_sequence_count} sequences left')
            time.sleep(_DRAIN_POLL_SECONDS)


def fleet_table(replicas: list[pb.Replica], *, now: datetime) -> Table:
    """Return the replicas as a table of 80 columns, services together, each with address and engine below its id."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    for name in ('replica', 'state', 'running', 'kv', 'tok/s', 'hits', 'held', 'heard'):
        is_number = name not in {'replica', 'state'}
        table.add_column(name, justify='right' if is_number else 'left', no_wrap=True)
    for replica in sorted(replicas, key=lambda item: (item.service, item.address)):
        table.add_row(
            f'{replica.replica_id}\n[dim]{replica.address} {replica.engine or replica.service}[/dim]',
            STATES.get(replica.state, '?'),
            *_load_cells(replica),
            _heard(replica, now),
        )
    if not replicas:
        table.add_row('none; `twinkle fleet add` starts one')
    return table


def _load_cells(replica: pb.Replica) -> tuple[str, ...]:
    """Return sequences (running of most, and waiting), cache use, speed, prefix hits and versions held."""
    if not replica.HasField('load'):
        return ('',) * 5
    load = replica.load
    waiting = f' +{load.waiting_sequence_count}' if load.waiting_sequence_count else ''
    return (
        f'{load.running_sequence_count}/{load.max_sequence_count or "?"}{waiting}',
        f'{load.kv_usage:.0%}',
        f'{load.tokens_per_second:.0f}',
        f'{load.prefix_hit_rate:.0%}',
        str(len(replica.resident_adapters)),
    )


def _heard(replica: pb.Replica, now: datetime) -> str:
    if replica.is_static:
        return 'static'
    if not replica.HasField('heartbeat_time'):
        return ''
    return f'{max((now - replica.heartbeat_time.ToDatetime(UTC)).total_seconds(), 0):.0f} s ago'


def _find(fleet: FleetAdministration, replica_id: str) -> pb.Replica | None:
    return next((item for item in fleet.list_replicas() if item.replica_id == replica_id), None)


def _drain(fleet: FleetAdministration, replica_id: str, state_dir: Path | None) -> None:
    """Ask a replica to leave; where it is of the local stack, see to it first that nobody starts it again."""
    folder = (state_dir or default_state_dir()).absolute()
    replica = _find(fleet, replica_id)
    try:
        is_ours = replica is not None and leave_stack(folder, replica.address)
    except StackError as error:
        fail(str(error))
    try:
        fleet.drain(replica_id)
    except Error:
        if replica is not None and is_ours:
            leave_stack(folder, replica.address, is_leaving=False)
        raise


def _silent(service: str, event: str) -> None:
    del service, event
