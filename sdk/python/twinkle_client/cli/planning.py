"""`twinkle estimate`: what a run would cost; and whether base models fit on this machine at all."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from twinkle.data_format import LoraConfig
from twinkle_client.cli.session import StateDirOption, console, fail, open_client
from twinkle_client.model import MultiLoraTransformersModel


def estimate(
    model: Annotated[str, typer.Argument(help='The base model, as the server names it.')],
    rank: Annotated[int, typer.Option('--rank', help='Rank of the adapter.')] = 8,
    batch: Annotated[int, typer.Option('--batch', help='Examples a batch.')] = 8,
    tokens: Annotated[int, typer.Option('--tokens', help='Tokens an example.')] = 512,
    is_full: Annotated[bool, typer.Option('--full', help="Train the base model's own weights.")] = False,
    state_dir: StateDirOption = None,
) -> None:
    """Say what a run would cost, before anything is made: memory, time a step, and whether it fits."""
    with open_client(state_dir) as client:
        config = None if is_full else LoraConfig(r=rank)
        handle = MultiLoraTransformersModel(model, client=client)
        with console.status('asking; for its first answer a service measures its model, which may take a minute'):
            cost = handle.estimate(config, batch_size=batch, sequence_tokens=tokens, full_parameters=is_full)
    table = Table(show_header=False)
    table.add_row('trainable parameters', f'{cost["parameter_count"]:,}')
    table.add_row('memory at rest', _size(cost['adapter_bytes']))
    table.add_row('most memory in a step', _size(cost['peak_bytes']))
    table.add_row('memory free for it', _size(cost['available_bytes']))
    table.add_row('time of a step', f'{cost["step_time"].total_seconds():.2f} s')
    console.print(table)
    if not cost['does_fit']:
        fail('it does not fit beside what runs there now')


def warn_of_memory(folders: Sequence[Path], *, copies: int) -> None:
    """Say so where the weights of base models alone, as they are on the disk, need more than the free memory.

    Where they are held on accelerators, it says too much: those are not looked at.

    Args:
        folders: of the base models.
        copies: how many processes hold each.
    """
    needed = copies * sum(path.stat().st_size for folder in folders for path in folder.glob('*.safetensors'))
    free = _available_bytes()
    if free is not None and needed > free:
        text = f'{copies} times the weights of {len(folders)} base models are {_size(needed)}; free are {_size(free)}'
        console.print(f'[yellow]memory: {text}[/yellow]', soft_wrap=True)


def _available_bytes() -> int | None:
    """Return how much memory programs may take; None where the system does not tell."""
    try:
        text = Path('/proc/meminfo').read_text(encoding='ascii')
    except OSError:
        return None
    found = re.search(r'^MemAvailable:\s+(\d+) kB$', text, re.MULTILINE)
    return int(found[1]) * 1024 if found else None


def _size(count: int) -> str:
    return f'{count / 2**20:.1f} MiB' if count < 1 << 30 else f'{count / 2**30:.2f} GiB'
