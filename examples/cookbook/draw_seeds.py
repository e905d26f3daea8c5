"""Draw several runs of a recipe into one picture, a line for each seed: `python -m examples.cookbook.draw_seeds`.

For instance `docs/curves/grpo_arithmetic_seed*.jsonl --names held_out_reward,reward --out picture.png`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from examples.cookbook.plots import plot_runs


def main() -> None:
    """Draw what the command line names."""
    parser = argparse.ArgumentParser(prog='python -m examples.cookbook.draw_seeds', description=__doc__)
    parser.add_argument('curves', nargs='+', type=Path, help='files as `curves.jsonl` of a run, one for each seed')
    parser.add_argument('--names', default='held_out_reward,reward', help='numbers to draw, a panel each')
    parser.add_argument('--title', default='', help='above the panels (default: the name of the first file)')
    parser.add_argument('--out', type=Path, required=True, help='the PNG')
    options = parser.parse_args()
    runs = {path.stem.rpartition('_')[2]: read_curve(path) for path in options.curves}
    names = options.names.split(',')
    for name in names:
        if not any(name in step for steps in runs.values() for step in steps):
            parser.error(f'--names: no curve has {name!r}; they have {", ".join(known_names(runs))}')
    plot_runs(runs, names, title=options.title or options.curves[0].stem.rpartition('_')[0], path=options.out)


def read_curve(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def known_names(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return the names of all numbers, sorted."""
    return sorted({name for steps in runs.values() for step in steps for name in step})


if __name__ == '__main__':
    main()
