"""`twinkle checkpoint ...`: everything a tenant does with what is kept of its runs."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import export_service_pb2
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.cli.durations import parse_duration
from twinkle_client.cli.moments import local_text
from twinkle_client.cli.session import StateDirOption, console, fail, open_client
from twinkle_client.progress import byte_progress

app = typer.Typer(help='Checkpoints: list, download, upload, share, delete, push to a hub.', no_args_is_help=True)
PathArgument = Annotated[str, typer.Argument(help='twinkle://<run>/weights/<name>')]
ExportArgument = Annotated[str, typer.Argument(help='The id that `push` printed.')]


@app.command('list')
def list_checkpoints(
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
        times = (local_text(item.create_time), local_text(item.expire_time))
        table.add_row(item.path, str(item.step_count), size, *words, labels, *times)
    console.print(table)


@app.command('download')
def download(
    path: PathArgument,
    folder: Annotated[Path, typer.Argument(help='Where the peft folder goes.')],
    state_dir: StateDirOption = None,
) -> None:
    """Fetch a checkpoint as a peft folder; goes on where an earlier download stopped."""
    with open_client(state_dir) as client, byte_progress('download') as report:
        done = client.download_checkpoint(path, folder, report=report)
    console.print(str(done), highlight=False, soft_wrap=True)


@app.command('upload')
def upload(
    source: Annotated[Path, typer.Argument(help='A peft folder, or a .tar or .tar.gz of one.')],
    name: Annotated[str, typer.Option('--name', help='Of the checkpoint.')],
    base_model: Annotated[
        str, typer.Option('--base-model', help='What it adapts. Unset: the only one that the server trains.')
    ] = '',
    state_dir: StateDirOption = None,
) -> None:
    """Make a checkpoint of an adapter that peft saved; goes on where an earlier upload stopped."""
    with open_client(state_dir) as client, byte_progress('upload') as report:
        made = CheckpointLibrary(client=client).upload(source, name, base_model=base_model, report=report)
    console.print(made.path, highlight=False, soft_wrap=True)


@app.command('publish')
def publish(path: PathArgument, state_dir: StateDirOption = None) -> None:
    """Let every tenant read a checkpoint."""
    with open_client(state_dir) as client:
        CheckpointLibrary(client=client).publish(path)


@app.command('unpublish')
def unpublish(path: PathArgument, state_dir: StateDirOption = None) -> None:
    """Let its owner alone read a checkpoint."""
    with open_client(state_dir) as client:
        CheckpointLibrary(client=client).unpublish(path)


@app.command('ttl')
def ttl(
    path: PathArgument,
    time: Annotated[
        timedelta | None,
        typer.Argument(parser=parse_duration, metavar='[TIME]', help='Such as 30d. Unset: it is kept.'),
    ] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Have a checkpoint deleted after some time from now, or keep it."""
    with open_client(state_dir) as client:
        CheckpointLibrary(client=client).set_ttl(path, time)


@app.command('delete')
def delete(path: PathArgument, state_dir: StateDirOption = None) -> None:
    """Delete a checkpoint."""
    with open_client(state_dir) as client:
        client.delete_checkpoint(path)


@app.command('push')
def push(
    path: PathArgument,
    target: Annotated[str, typer.Argument(help='hf://<owner>/<name> or file:///<folder>')],
    public: Annotated[bool, typer.Option('--public', help='Let everybody see a repository that is made.')] = False,
    wait: Annotated[bool, typer.Option('--wait', help='Stay until it is there.')] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Send a checkpoint to a hub, in the background; the token is taken from HF_TOKEN."""
    token = os.environ.get('HF_TOKEN', '') if target.startswith('hf://') else ''
    with open_client(state_dir) as client:
        library = CheckpointLibrary(client=client)
        export = library.push(path, target, token=token, is_private=not public)
        if wait:
            with byte_progress('read') as report:
                export = library.wait_export(export.export_id, report=report)
    console.print(export.export_id if not wait else export.url, highlight=False, soft_wrap=True)
    if wait and export.state != export_service_pb2.EXPORT_STATE_DONE:
        fail(export.failure.message or f'the export is {state_word(export)}')


@app.command('exports')
def exports(state_dir: StateDirOption = None) -> None:
    """List what is on its way to hubs, or was, newest first."""
    with open_client(state_dir) as client:
        found = CheckpointLibrary(client=client).list_exports()
    table = Table()
    for name in ('export', 'checkpoint', 'target', 'state', 'tries', 'where, or why not'):
        table.add_column(name, overflow='fold')
    for item in found:
        told = item.url or item.failure.message
        table.add_row(
            item.export_id, item.checkpoint_path, item.target, state_word(item), str(item.attempt_count), told
        )
    console.print(table)


@app.command('cancel')
def cancel(export: ExportArgument, state_dir: StateDirOption = None) -> None:
    """End an export; what a hub has taken by then stays there."""
    with open_client(state_dir) as client:
        found = CheckpointLibrary(client=client).cancel_export(export)
    console.print(state_word(found))


def state_word(export: export_service_pb2.Export) -> str:
    """Return an export's state as a word."""
    return export_service_pb2.ExportState.Name(export.state).removeprefix('EXPORT_STATE_').lower()
