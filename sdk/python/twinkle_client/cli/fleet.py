"""`twinkle fleet`: the replicas behind a gateway."""

import os
import sys
import time
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich import box
from rich.table import Table

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle_client.cli.session import (
    JsonOption,
    LocalStateDirOption,
    StateDirOption,
    console,
    exit_on_interrupt,
    fail,
    interrupt_on_termination,
    message_json,
    open_client,
    print_json,
    print_table,
)
from twinkle_client.fleet import STATES, FleetAdministration
from twinkle_client.stack import (
    ENGINES,
    StackError,
    StackState,
    add_sampler,
    default_state_dir,
    drain_replica,
    remove_ended,
)

app = typer.Typer(help='Manage the replicas behind the gateway. Lists them by default.', invoke_without_command=True)
TOKEN_VARIABLE = 'TWINKLE_SAMPLER_INTERNAL_TOKEN'  # noqa: S105 (a name, not a secret)
_NOT_ADDED = 'the sampler that was starting is stopped; other samplers keep running'
_DRAIN_POLL_SECONDS = 0.5
_DRAIN_LIMIT_SECONDS = 600.0
_EXIT_SECONDS = 30.0
"""Maximum wait for the exit of a drained sampler. If it exits later, `twinkle up` removes it from the record."""


@app.callback()
def show(context: typer.Context, is_json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """Show the replicas with their state, load and adapters."""
    if context.invoked_subcommand is not None:
        # The option may be given before or after the subcommand.
        context.default_map = {context.invoked_subcommand: {'state_dir': state_dir}}
        return
    with open_client(state_dir) as client:
        replicas = FleetAdministration(client=client).list_replicas()
    if is_json:
        print_json([message_json(replica) for replica in replicas])
        return
    print_table(fleet_table(replicas, now=datetime.now(UTC)))


@app.command('add')
def add(
    count: Annotated[int, typer.Option('--count', min=1, max=64, help='Number of samplers to start.')] = 1,
    engine: Annotated[str, typer.Option('--engine', help="torch or vllm. Default: the first sampler's engine.")] = '',
    model: Annotated[str, typer.Option('--model', help="Base model. Default: the stack's first base model.")] = '',
    state_dir: LocalStateDirOption = None,
) -> None:
    """Add samplers to the local stack."""
    if engine not in {'', *ENGINES[1:]}:
        fail(f'--engine must be torch or vllm, got {engine!r}')
    # A signal that ends this command must first stop the sampler that is starting.
    interrupt_on_termination()
    folder = (state_dir or default_state_dir()).absolute()
    for _ in range(count):
        begin = time.monotonic()
        try:
            with exit_on_interrupt(_NOT_ADDED), console.status('starting a sampler'):
                added = add_sampler(folder, engine=engine, base_model=model, report=_silent)
        except (StackError, OSError) as error:
            fail(str(error))
        console.print(f'  {added.name:<11} {added.address}  ready after {time.monotonic() - begin:.1f} s')


@app.command('join')
def join(
    gateway: Annotated[str, typer.Argument(help='Address of the gateway, host:port.')],
    model: Annotated[str, typer.Option('--model', help='Name of the base model in the deployment.')],
    listen: Annotated[
        str, typer.Option('--listen', help='Address to listen on; the gateway must be able to reach it.')
    ],
    engine: Annotated[str, typer.Option('--engine', help='torch or vllm.')] = 'vllm',
    checkpoint: Annotated[
        str, typer.Option('--checkpoint', help='Address of the checkpoint service. Default: provided by the gateway.')
    ] = '',
) -> None:
    """Run a sampler on this host, in the foreground, as part of a remote gateway's fleet.

    The deployment's internal token is read from TWINKLE_SAMPLER_INTERNAL_TOKEN. Ctrl-C drains and stops the sampler.
    """
    if engine not in ENGINES[1:]:
        fail(f'--engine must be torch or vllm, got {engine!r}')
    if not os.environ.get(TOKEN_VARIABLE):
        fail(f'{TOKEN_VARIABLE} is not set; set it to the internal token of the deployment')
    settings = {
        'base_model': model,
        'gateways': f'[{gateway}]',
        'listen': listen,
        'engine': engine,
        'checkpoint_address': checkpoint,
    }
    words = [word for name, value in settings.items() if value for word in ('--set', f'{name}={value}')]
    # The sampler replaces this process, so that it receives signals directly.
    os.execv(sys.executable, [sys.executable, '-m', 'twinkle_services.sampler', *words])  # noqa: S606 (no shell is needed)


@app.command('drain')
def drain(
    replica_id: Annotated[str, typer.Argument(help='Replica id, as listed by `twinkle fleet`.')],
    state_dir: StateDirOption = None,
) -> None:
    """Drain a replica and wait until it has left the fleet."""
    with open_client(state_dir) as client:
        fleet = FleetAdministration(client=client)
        folder = (state_dir or default_state_dir()).absolute()
        address = _drain(fleet, replica_id, folder)
        with exit_on_interrupt(f'{replica_id} continues draining'):
            _wait_until_left(fleet, replica_id)
        with suppress(StackError), console.status(f'waiting until {replica_id} has exited'):
            _wait_until_removed(folder, address)
    console.print(f'{replica_id} has left', highlight=False, soft_wrap=True)


@app.command('end-lease')
def end_lease(
    model: Annotated[str, typer.Argument(help='Base model of the model service.')],
    state_dir: StateDirOption = None,
) -> None:
    """Park the full-parameter run that leases a model service of a base model, so that other runs can train."""
    with open_client(state_dir) as client:
        run_id = FleetAdministration(client=client).end_lease(model)
    console.print(f'{run_id} is parked' if run_id else f'{model} is not leased', highlight=False, soft_wrap=True)


@app.command('take-over')
def take_over(
    trainer: Annotated[str, typer.Argument(help='Ended trainer, as named in `peer_trainers` of the model services.')],
    model: Annotated[str, typer.Option('--model', help='Base model of the trainers.')],
    state_dir: StateDirOption = None,
) -> None:
    """Move the runs of an ended trainer to another trainer of the same base model.

    First stop the process of the ended trainer, or turn its machine off.
    """
    with open_client(state_dir) as client, console.status(f'taking over the runs of {trainer}'):
        count = FleetAdministration(client=client).take_over(model, trainer)
    console.print(f'{count} runs of {trainer} were taken over', highlight=False, soft_wrap=True)


def _wait_until_left(fleet: FleetAdministration, replica_id: str) -> None:
    end = time.monotonic() + _DRAIN_LIMIT_SECONDS
    with console.status(f'draining {replica_id}') as status:
        while (replica := _find(fleet, replica_id)) is not None and replica.state != pb.REPLICA_STATE_LOST:
            count = replica.load.running_sequence_count
            if time.monotonic() > end:
                fail(f'{replica_id} still has {count} sequences; it continues draining')
            status.update(f'draining {replica_id}: {count} sequences left')
            time.sleep(_DRAIN_POLL_SECONDS)


def _wait_until_removed(folder: Path, address: str) -> None:
    """Wait a limited time until the drained service at this address has exited, so that its resources are free."""
    end = time.monotonic() + _EXIT_SECONDS
    while (state := StackState.load(folder)) is not None and time.monotonic() < end:
        if not any(item.is_leaving and item.address == address for item in state.services):
            return
        remove_ended(folder)
        time.sleep(_DRAIN_POLL_SECONDS)


def fleet_table(replicas: list[pb.Replica], *, now: datetime) -> Table:
    """Return a table of the replicas, sorted by service; with short addresses, it fits into 80 columns."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    addresses = [f'{item.address} {item.engine or item.service}' for item in replicas]
    for name in ('replica', 'state', 'running', 'kv', 'tok/s', 'hits', 'adapters', 'seen'):
        is_number = name not in {'replica', 'state'}
        table.add_column(name, justify='right' if is_number else 'left', no_wrap=True)
    table.columns[0].min_width = max(map(len, (*(item.replica_id for item in replicas), *addresses)), default=0)
    for replica in sorted(replicas, key=lambda item: (item.service, item.address)):
        table.add_row(
            f'{replica.replica_id}\n[dim]{replica.address} {replica.engine or replica.service}[/dim]',
            STATES.get(replica.state, '?'),
            *_load_cells(replica),
            _last_seen(replica, now),
        )
    if not replicas:
        table.add_row('none; add one with `twinkle fleet add`')
    return table


def _load_cells(replica: pb.Replica) -> tuple[str, ...]:
    """Return running, maximum and waiting sequences, KV cache usage, speed, prefix hit rate and adapter count."""
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


def _last_seen(replica: pb.Replica, now: datetime) -> str:
    if replica.is_static:
        return 'static'
    if not replica.HasField('heartbeat_time'):
        return ''
    return f'{max((now - replica.heartbeat_time.ToDatetime(UTC)).total_seconds(), 0):.0f} s ago'


def _find(fleet: FleetAdministration, replica_id: str) -> pb.Replica | None:
    return next((item for item in fleet.list_replicas() if item.replica_id == replica_id), None)


def _drain(fleet: FleetAdministration, replica_id: str, folder: Path) -> str:
    """Request the drain of a replica and return its address; empty if there is no such replica."""
    replica = _find(fleet, replica_id)
    address = replica.address if replica else ''
    try:
        drain_replica(folder, replica_id, address, drain=fleet.drain)
    except StackError as error:
        fail(str(error))
    return address


def _silent(service: str, event: str) -> None:
    del service, event
