"""`twinkle estimate`, which predicts the cost of a planned run, and the memory check of `twinkle up`."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from twinkle.data_format import LoraConfig
from twinkle_client.cli.session import (
    JsonOption,
    StateDirOption,
    console,
    error_console,
    fail,
    open_client,
    print_json,
)
from twinkle_client.model import MultiLoraTransformersModel


@dataclass(frozen=True, kw_only=True)
class EstimateOptions:
    """Options of `twinkle estimate`."""

    model: Annotated[str, typer.Argument(help='Name of the base model on the server.')]
    rank: Annotated[int, typer.Option('--rank', help='LoRA rank of the adapter.')] = 8
    batch: Annotated[int, typer.Option('--batch', help='Examples per batch.')] = 8
    tokens: Annotated[int, typer.Option('--tokens', help='Tokens per example.')] = 512
    is_full: Annotated[bool, typer.Option('--full', help="Train the base model's weights instead of an adapter.")] = (
        False
    )
    is_json: JsonOption = False
    state_dir: StateDirOption = None


def estimate(given: EstimateOptions) -> None:
    """Estimate the memory and the step time of a training run.

    Exits with status 1 if the run does not fit.
    """
    with open_client(given.state_dir) as client:
        config = None if given.is_full else LoraConfig(r=given.rank)
        handle = MultiLoraTransformersModel(given.model, client=client)
        with _progress():
            cost = handle.estimate(
                config, batch_size=given.batch, sequence_tokens=given.tokens, full_parameters=given.is_full
            )
    if given.is_json:
        print_json({**cost, 'step_time': cost['step_time'].total_seconds()})
    else:
        _print_cost(cost)
    if cost['is_measured_under_load']:
        note = 'the machine was busy while the model was measured, so a step may take less time; estimate again later'
        error_console.print(note, markup=False, highlight=False, soft_wrap=True)
    if not cost['does_fit']:
        fail('the run does not fit into the available memory; use a smaller batch, fewer tokens or a lower rank')


def _progress() -> Progress:
    """Show the waiting time on a terminal until the block ends."""
    progress = Progress(
        SpinnerColumn(), TextColumn('{task.description}'), TimeElapsedColumn(), console=error_console, transient=True
    )
    progress.add_task('estimating; the first estimate of a model may take a minute')
    return progress


def _print_cost(cost: Mapping[str, Any]) -> None:
    table = Table(show_header=False)
    table.add_row('trainable parameters', f'{cost["parameter_count"]:,}')
    table.add_row('memory between batches', _size(cost['adapter_bytes']))
    table.add_row('peak memory of a step', _size(cost['peak_bytes']))
    table.add_row('available memory', _size(cost['available_bytes']))
    table.add_row('step time', f'{cost["step_time"].total_seconds():.2f} s')
    console.print(table)


def warn_of_memory(folders: Sequence[Path], *, copies: int) -> None:
    """Print a warning if the weights of the base models need more than the available memory.

    The memory of accelerators is not considered, so the warning may be unnecessary on machines with accelerators.

    Args:
        folders: Folders of the base models.
        copies: Number of processes that load each model.
    """
    needed = copies * sum(path.stat().st_size for folder in folders for path in folder.glob('*.safetensors'))
    free = _available_bytes()
    if free is not None and needed > free:
        text = f'{copies} copies of {len(folders)} base models need {_size(needed)}; {_size(free)} are available'
        console.print(f'[yellow]low memory: {text}[/yellow]', soft_wrap=True)


def _available_bytes() -> int | None:
    """Return the available memory, or None if the system does not report it."""
    try:
        text = Path('/proc/meminfo').read_text(encoding='ascii')
    except OSError:
        return None
    found = re.search(r'^MemAvailable:\s+(\d+) kB$', text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _size(count: int) -> str:
    return f'{count / 2**20:.1f} MiB' if count < 1 << 30 else f'{count / 2**30:.2f} GiB'
