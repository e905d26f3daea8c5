"""`twinkle checkpoint download`: a checkpoint as a peft folder, as a model folder or as a GGUF file."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from twinkle.hub.progress import terminal_progress
from twinkle_client.checkpoints import CheckpointLibrary
from twinkle_client.cli.session import StateDirOption, console, exit_on_interrupt, fail, open_client
from twinkle_client.progress import byte_progress

_FORMATS = ('safetensors', 'gguf')


@dataclass(frozen=True, kw_only=True)
class DownloadOptions:
    """Options of `twinkle checkpoint download`."""

    path: Annotated[str, typer.Argument(help='Checkpoint path, twinkle://<run>/weights/<name>.')]
    target: Annotated[Path, typer.Argument(help='Target folder or, for GGUF, target file.')]
    merged: Annotated[bool, typer.Option('--merged', help='Merge the adapter into its base model.')] = False
    model_format: Annotated[
        str, typer.Option('--format', help='Format of a merged model: safetensors, or gguf, which implies --merged.')
    ] = 'safetensors'
    base: Annotated[
        str,
        typer.Option('--base', help='Folder or id of the base model. Default: the one that the checkpoint names.'),
    ] = ''
    dtype: Annotated[
        str,
        typer.Option(
            '--dtype',
            help='Type of the merged weights: bfloat16, float16, float32 or, in GGUF, q8_0. Default: as the base.',
        ),
    ] = ''
    state_dir: StateDirOption = None


def download(given: DownloadOptions) -> None:
    """Download a checkpoint as a peft folder, or merged into its base model as a model folder or a GGUF file.

    A repeated command resumes an interrupted download.
    """
    if given.model_format not in _FORMATS:
        fail(f'--format must be {" or ".join(_FORMATS)}, got {given.model_format!r}')
    is_gguf = given.model_format == 'gguf'
    if not (given.merged or is_gguf) and (given.base or given.dtype):
        fail('--base and --dtype require --merged or --format gguf')
    with exit_on_interrupt('run the command again to resume'), open_client(given.state_dir) as client:
        if given.merged or is_gguf:
            library = CheckpointLibrary(client=client)
            write = library.download_gguf if is_gguf else library.download_merged
            with terminal_progress() as report:
                done = write(given.path, given.target, base=given.base, dtype=given.dtype or None, report=report)
        else:
            with byte_progress('download') as report:
                done = client.download_checkpoint(given.path, given.target, report=report)
    console.print(str(done), highlight=False, soft_wrap=True)
