"""`twinkle runs`: the list of training runs."""

from collections.abc import Mapping
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1.catalogue_service_pb2 import Run
from twinkle.api.model.v1 import adapter_pb2
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    error_console,
    fail,
    open_client,
    print_json,
    print_rows,
)
from twinkle_client.cli.times import local_text
from twinkle_client.client import TwinkleClient
from twinkle_client.model.queue_status import queue_status_line

NAME_LABEL = 'name'
"""Label with the name of a run; the other labels are its tags."""
_LABEL_HELP = 'List only runs with this label, as NAME=VALUE; repeat for several.'


def runs(
    label: Annotated[list[str] | None, typer.Option(help=_LABEL_HELP)] = None,
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """List training runs with their progress and queue position, newest first."""
    labels = dict(map(_label, label or ()))
    with open_client(state_dir) as client, error_console.status('loading the runs'):
        found = client.list_training_runs(user_metadata=labels)
        adapters = {adapter.adapter_id: adapter for adapter in client.list_adapters()}
        rows = [_row(client, run, adapters.get(run.run_id)) for run in found]
    if is_json:
        print_json(rows)
        return
    columns = ('name', 'base model', 'rank', 'steps', 'version', 'state', 'created')
    table = Table('run', *columns)
    for run, row in zip(found, rows, strict=True):
        numbers = (str(row['lora_rank'] or ''), str(row['steps']), str(row['version']))
        name = run.user_metadata.get(NAME_LABEL, '')
        table.add_row(run.run_id, name, run.base_model, *numbers, str(row['state']), local_text(run.create_time))
    print_rows(table, empty='no runs yet' if not labels else 'no run has these labels')


def run_as_json(run: Run) -> dict[str, object]:
    """Return a run for JSON."""
    return {
        'run': run.run_id,
        'name': run.user_metadata.get(NAME_LABEL, ''),
        'base_model': run.base_model,
        'lora_rank': run.lora_rank,
        'steps': run.step_count,
        'version': run.version,
        'is_active': run.is_active,
        'labels': dict(run.user_metadata),
        'create_time': run.create_time.ToJsonString(),
    }


def _row(client: TwinkleClient, run: Run, adapter: adapter_pb2.Adapter | None) -> Mapping[str, object]:
    """Return a run for JSON, with the state of its next operation if the model service has the adapter."""
    if adapter is None:
        return {**run_as_json(run), 'state': 'active' if run.is_active else 'ended'}
    record = client.find_operation(adapter.adapter_id, adapter.sequence_number + 1)
    state = 'idle' if record is None else queue_status_line(record) or 'running'
    # The catalogue receives step counts later than the model service.
    return {**run_as_json(run), 'steps': adapter.step_count, 'state': state}


def _label(text: str) -> tuple[str, str]:
    name, separator, value = text.partition('=')
    if not name or not separator:
        fail(f'--label: expected NAME=VALUE, got {text!r}')
    return name, value
