"""Cost of the journal: the same steps alternate between a model service with a journal and one without."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.standalone_model import StandaloneAdapter, random_batch, running_model
from benchmarks.timing import ratio_by_round, time_alternately
from twinkle.hub import resolve_model

SHAPES = {'usual': (8, 64), 'tiny': (1, 16)}
"""Number and length of examples by name; the tiny shape shows the overhead of an operation with little computation."""


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the comparison and return its figures."""
    parser = argparse.ArgumentParser(prog='./run bench journal_overhead')
    parser.add_argument('--model', default='smollm2-135m-instruct', help='hub id, alias or folder')
    parser.add_argument('--rounds', type=int, default=15)
    parser.add_argument('--device', default='cpu')
    parser.add_argument('--dtype', default='float32')
    options = parser.parse_args(arguments)
    base_model = str(resolve_model(options.model))
    engine = {'device': options.device, 'dtype': options.dtype}
    with (
        running_model(base_model, journal='sqlite', **engine) as journaled,
        running_model(base_model, journal='none', **engine) as bare,
    ):
        figures = {
            name: _ratio(journaled.create(lora_rank=8), bare.create(lora_rank=8), shape, rounds=options.rounds)
            for name, shape in SHAPES.items()
        }
        size = _folder_bytes(journaled.state_dir)
    return {'model': options.model, 'goal_usual': '< 1.03', **figures, 'state_folder_mib': round(size / 2**20, 2)}


def _ratio(
    journaled: StandaloneAdapter, bare: StandaloneAdapter, shape: tuple[int, int], *, rounds: int
) -> dict[str, Any]:
    examples, length = shape
    batch = random_batch(examples=examples, length=length, vocabulary=300)

    def train(adapter: StandaloneAdapter) -> None:
        adapter.forward_backward(batch)
        adapter.step()

    durations = time_alternately(
        {'with_journal': lambda: train(journaled), 'without': lambda: train(bare)}, rounds=rounds, warmups=2
    )
    return {
        'tokens_per_step': examples * length,
        'with_journal_over_without': ratio_by_round(durations['with_journal'], durations['without']),
        'ratio_of_medians': round(durations['with_journal'].median / durations['without'].median, 4),
        **{name: spread.as_figures() for name, spread in durations.items()},
    }


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob('*') if path.is_file())
