"""`twinkle runs`: the list of training runs."""

from rich.table import Table

from twinkle.api.model.v1 import adapter_pb2
from twinkle_client.cli.session import StateDirOption, error_console, open_client, print_rows
from twinkle_client.cli.times import local_text
from twinkle_client.client import TwinkleClient
from twinkle_client.model.queue_status import queue_status_line


def runs(state_dir: StateDirOption = None) -> None:
    """List training runs with their progress and queue position, newest first."""
    with open_client(state_dir) as client, error_console.status('loading the runs'):
        found = client.list_training_runs()
        adapters = {adapter.adapter_id: adapter for adapter in client.list_adapters()}
        states = {name: _state(client, adapter) for name, adapter in adapters.items()}
    table = Table()
    for name in ('run', 'base model', 'rank', 'steps', 'version', 'state', 'created'):
        table.add_column(name, overflow='fold')
    for run in found:
        # The catalogue receives step counts later than the model service.
        steps = adapters[run.run_id].step_count if run.run_id in adapters else run.step_count
        numbers = (str(run.lora_rank or ''), str(steps), str(run.version))
        state = states.get(run.run_id, 'active' if run.is_active else 'ended')
        table.add_row(run.run_id, run.base_model, *numbers, state, local_text(run.create_time))
    print_rows(table, empty='no runs yet')


def _state(client: TwinkleClient, adapter: adapter_pb2.Adapter) -> str:
    record = client.find_operation(adapter.adapter_id, adapter.sequence_number + 1)
    return 'idle' if record is None else queue_status_line(record) or 'running'
