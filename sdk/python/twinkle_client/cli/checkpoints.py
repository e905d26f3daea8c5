"""`twinkle checkpoint`: management of a tenant's checkpoints and their exports."""

import os
from datetime import timedelta
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from twinkle.api.gateway.v1 import export_service_pb2
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.cli.downloading import download
from twinkle_client.cli.options import with_options
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    console,
    fail,
    message_json,
    open_client,
    print_json,
    print_rows,
)
from twinkle_client.cli.times import local_text, parse_duration
from twinkle_client.errors import Error
from twinkle_client.progress import byte_progress

app = typer.Typer(help='Manage checkpoints: list, download, upload, share, delete, export.', no_args_is_help=True)
PathArgument = Annotated[str, typer.Argument(help='Checkpoint path, twinkle://<run>/weights/<name>.')]
ExportArgument = Annotated[str, typer.Argument(help='Export id, as printed by `push`.')]


@app.command('list')
def list_checkpoints(
    run: Annotated[str, typer.Argument(help='Run id. Default: all runs.')] = '',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """List checkpoints, newest first."""
    with open_client(state_dir) as client:
        found = client.list_checkpoints(run)
    if is_json:
        print_json([message_json(item) for item in found])
        return
    columns = ('steps', 'size', 'resumable', 'public', 'labels', 'created', 'expires')
    table = Table('path', *columns)
    for item in found:
        size = f'{item.size_bytes / 2**20:.1f} MiB'
        words = ['yes' if fact else 'no' for fact in (item.is_optimizer_included, item.is_public)]
        labels = ', '.join(f'{name}={value}' for name, value in sorted(item.user_metadata.items()))
        times = (local_text(item.create_time), local_text(item.expire_time))
        table.add_row(item.path, str(item.step_count), size, *words, labels, *times)
    print_rows(table, empty='no checkpoints yet')


app.command('download')(with_options(download))


@app.command('verify')
def verify(
    path: Annotated[str, typer.Argument(help='Checkpoint path. Default: all checkpoints.')] = '',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Compare the stored files with the digests recorded when they were saved. Fails if a checkpoint is damaged."""
    damaged = list[str]()
    checked = list[dict[str, object]]()
    with open_client(state_dir) as client:
        library = CheckpointLibrary(client=client)
        for name in [path] if path else [item.path for item in client.list_checkpoints()]:
            try:
                library.verify(name)
            except Error as error:
                if error.reason != 'CHECKPOINT_DAMAGED':
                    raise
                damaged.append(name)
            checked.append({'path': name, 'is_damaged': name in damaged})
            if not is_json:
                console.print(f'{name} {"damaged" if name in damaged else "ok"}', highlight=False, soft_wrap=True)
    if is_json:
        print_json(checked)
    if len(damaged) == 1:
        fail('1 checkpoint is damaged; delete it, or restore its files from a backup')
    if damaged:
        fail(f'{len(damaged)} checkpoints are damaged; delete them, or restore their files from a backup')


@app.command('upload')
def upload(
    source: Annotated[Path, typer.Argument(help='Peft folder, or a .tar or .tar.gz archive of the folder.')],
    name: Annotated[str, typer.Option('--name', help='Name of the checkpoint.')],
    base_model: Annotated[
        str, typer.Option('--base-model', help='Base model of the adapter. Default: the only trainable base model.')
    ] = '',
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Upload an adapter saved by peft. A repeated command resumes an interrupted upload."""
    with open_client(state_dir) as client, byte_progress('upload') as report:
        made = CheckpointLibrary(client=client).upload(source, name, base_model=base_model, report=report)
    if is_json:
        print_json(message_json(made))
        return
    console.print(made.path, highlight=False, soft_wrap=True)


@app.command('publish')
def publish(path: PathArgument, state_dir: StateDirOption = None) -> None:
    """Make a checkpoint readable by every tenant."""
    with open_client(state_dir) as client:
        CheckpointLibrary(client=client).publish(path)


@app.command('unpublish')
def unpublish(path: PathArgument, state_dir: StateDirOption = None) -> None:
    """Make a checkpoint private again."""
    with open_client(state_dir) as client:
        CheckpointLibrary(client=client).unpublish(path)


@app.command('ttl')
def ttl(
    path: PathArgument,
    time: Annotated[
        timedelta | None,
        typer.Argument(
            parser=parse_duration, metavar='[TIME]', help='Lifetime from now, such as 30d. Default: unlimited.'
        ),
    ] = None,
    state_dir: StateDirOption = None,
) -> None:
    """Set or remove the expiry of a checkpoint."""
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
    target: Annotated[str, typer.Argument(help='Target: hf://<owner>/<name> or file:///<folder>.')],
    public: Annotated[bool, typer.Option('--public', help='Create the repository as public.')] = False,
    wait: Annotated[bool, typer.Option('--wait', help='Wait until the export has finished.')] = False,
    is_json: JsonOption = False,
    state_dir: StateDirOption = None,
) -> None:
    """Export a checkpoint to a hub or a folder. The server runs the export in the background.

    The hub token is read from HF_TOKEN.
    """
    token = os.environ.get('HF_TOKEN', '') if target.startswith('hf://') else ''
    with open_client(state_dir) as client:
        library = CheckpointLibrary(client=client)
        export = library.push(path, target, token=token, is_private=not public)
        if wait:
            with byte_progress('read') as report:
                export = library.wait_export(export.export_id, report=report)
    if is_json:
        print_json(message_json(export))
    else:
        console.print(export.export_id if not wait else export.url, highlight=False, soft_wrap=True)
    if wait and export.state != export_service_pb2.EXPORT_STATE_DONE:
        fail(export.failure.message or f'the export is {state_word(export)}')


@app.command('exports')
def exports(is_json: JsonOption = False, state_dir: StateDirOption = None) -> None:
    """List exports, newest first."""
    with open_client(state_dir) as client:
        found = CheckpointLibrary(client=client).list_exports()
    if is_json:
        print_json([message_json(item) for item in found])
        return
    columns = ('checkpoint', 'target', 'state', 'attempts', 'result')
    table = Table('export', *columns)
    for item in found:
        result = item.url or item.failure.message
        table.add_row(
            item.export_id, item.checkpoint_path, item.target, state_word(item), str(item.attempt_count), result
        )
    print_rows(table, empty='no exports yet')


@app.command('cancel')
def cancel(export: ExportArgument, state_dir: StateDirOption = None) -> None:
    """Cancel an export. Files that the hub has already received remain there."""
    with open_client(state_dir) as client:
        found = CheckpointLibrary(client=client).cancel_export(export)
    console.print(state_word(found))


def state_word(export: export_service_pb2.Export) -> str:
    """Return the display name of an export's state."""
    return export_service_pb2.ExportState.Name(export.state).removeprefix('EXPORT_STATE_').lower()
