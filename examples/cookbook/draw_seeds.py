"""Plot several runs of a recipe in one picture, one line per seed: `python -m examples.cookbook.draw_seeds`.

Example of arguments: `docs/curves/grpo_arithmetic_seed*.jsonl --names held_out_reward,reward --out picture.png`.
"""

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path


def main() -> None:
    """Plot the curves that the command line names."""
    parser = argparse.ArgumentParser(prog='python -m examples.cookbook.draw_seeds', description=__doc__)
    parser.add_argument('curves', nargs='+', type=Path, help='copies of `curves.jsonl`, such as ppo_seed0.jsonl')
    parser.add_argument('--names', default='held_out_reward,reward', help='numbers to plot, one panel each')
    parser.add_argument('--title', default='', help='title of the plot (default: from the name of the first file)')
    parser.add_argument('--out', type=Path, required=True, help='path of the PNG')
    options = parser.parse_args()
    runs = dict(zip(labels_of(options.curves), map(read_curve, options.curves), strict=True))
    names = options.names.split(',')
    for name in names:
        if not any(name in step for steps in runs.values() for step in steps):
            parser.error(f'--names: no curve has {name!r}; choose from {", ".join(known_names(runs))}')
    # Loading matplotlib takes longer than reading the options.
    from examples.cookbook.plots import plot_runs  # noqa: PLC0415

    plot_runs(runs, names, title=options.title or options.curves[0].stem.rpartition('_')[0], path=options.out)


def labels_of(paths: Sequence[Path]) -> list[str]:
    """Return a label for each file: the part of its name after the last `_`, or its path if files share this part."""
    labels = [path.stem.rpartition('_')[2] for path in paths]
    return [str(path) if labels.count(label) > 1 else label for path, label in zip(paths, labels, strict=True)]


def read_curve(path: Path) -> list[dict[str, float]]:
    """Return the numbers of each step."""
    return [json.loads(line) for line in path.read_text().splitlines()]


def known_names(runs: Mapping[str, Sequence[Mapping[str, float]]]) -> list[str]:
    """Return the sorted names of all numbers."""
    return sorted({name for steps in runs.values() for step in steps for name in step})


if __name__ == '__main__':
    main()
