"""`twinkle runs`, `checkpoints`."""

from typing import Annotated

import typer
from google.protobuf.timestamp_pb2 import Timestamp
from rich.table import Table

from twinkle.api.model.v1 import adapter_pb2
from twinkle_client.cli.session import StateDirOption, console, open_client
from twinkle_client.client import TwinkleClient
from twinkle_client.model.waiting import wait_line


def runs(state_dir: StateDirOption = None) -> None:
    """List the training runs, newest first: how far each is, and what its next operation waits for."""
    with open_client(state_dir) as client:
        found = client.list_training_runs()
        adapters = {adapter.adapter_id: adapter for adapter in client.list_adapters()}
        states = {name: _state(client, adapter) for name, adapter in adapters.items()}
    table = Table()
    for name in ('run', 'base model', 'rank', 'steps', 'version', 'state', 'created'):
        table.add_column(name, overflow='fold')
    for run in found:
        # The catalogue hears of steps a little later than the service that takes them.
        steps = adapters[run.run_id].step_count if run.run_id in adapters else run.step_count
        numbers = (str(run.lora_rank or ''), str(steps), str(run.version))
        state = states.get(run.run_id, 'active' if run.is_active else 'ended')
        table.add_row(run.run_id, run.base_model, *numbers, state, _local(run.create_time))
    console.print(table)


def checkpoints(
    run: Annotated[str, typer.Argument(help='Only those of this run.')] = '',
    state_dir: StateDirOption = None,
) -> None:
    """List the checkpoints, newest first."""
    with open_client(state_dir) as client:
        found = client.list_checkpoints(run)
    table = Table()
    for name in ('path', 'steps', 'size', 'resumable', 'public', 'labels', 'created', 'until'):
        table.add_column(name, overflow='fold')
    for item in found:
        size = f'{item.size_bytes / 2**20:.1f} MiB'
        words = ['yes' if fact else 'no' for fact in (item.is_optimizer_included, item.is_public)]
        labels = ', '.join(f'{name}={value}' for name, value in sorted(item.user_metadata.items()))
        times = (_local(item.create_time), _local(item.expire_time))
        table.add_row(item.path, str(item.step_count), size, *words, labels, *times)
    console.print(table)


def _state(client: TwinkleClient, adapter: adapter_pb2.Adapter) -> str:
    record = client.find_operation(adapter.adapter_id, adapter.sequence_number + 1)
    return 'idle' if record is None else wait_line(record) or 'running'


def _local(time: Timestamp) -> str:
    return time.ToDatetime().astimezone().strftime('%Y-%m-%d %H:%M') if time.seconds else ''
