"""A report on all runs so far: `results.json`, a table and a plot of the curves."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from e2e.cookbook.judging import MIN_STEPS, Verdict, judge
from e2e.cookbook.recipes import RECIPES

_FILE = 'result.json'
"""Name of the file with the result of one run, inside the folder of the run."""


@dataclass(frozen=True, kw_only=True)
class Result:
    """Result of one run of a recipe."""

    recipe: str
    status: int | None
    """Exit status; None if the run exceeded its time limit."""
    seconds: float
    engine: str
    metric: str
    curve: list[float]

    @property
    def verdict(self) -> Verdict | None:
        """Comparison of the curve's ends; None if the curve is too short."""
        is_rising = RECIPES[self.recipe].is_rising
        return judge(self.curve, is_rising=is_rising) if len(self.curve) >= MIN_STEPS else None

    @property
    def has_passed(self) -> bool:
        """Whether the recipe exited successfully and learned."""
        return self.status == 0 and self.verdict is not None and self.verdict.has_learned

    def save(self, folder: Path) -> None:
        """Write the result to a file in the folder of the run."""
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2) + '\n', encoding='utf-8')


def write_report(runs: Path, folder: Path) -> None:
    """Print a table of all results in `runs`, and write `results.json` and `curves.png` to `folder`."""
    results = [
        Result(**json.loads((runs / name / _FILE).read_text(encoding='utf-8')))
        for name in RECIPES
        if (runs / name / _FILE).is_file()
    ]
    hardware = {'machine': platform.machine(), 'cores': os.cpu_count()}
    recipes = [{**asdict(item), 'verdict': asdict(item.verdict) if item.verdict else None} for item in results]
    text = json.dumps({'hardware': hardware, 'recipes': recipes}, indent=2)
    (folder / 'results.json').write_text(text + '\n', encoding='utf-8')
    Console().print(_table(results))
    _plot(results, folder / 'curves.png')


def _table(results: list[Result]) -> Table:
    table = Table(title='Recipes of the cookbook')
    for name in ('recipe', 'metric', 'steps', 'first', 'last', 'standard error', 'seconds', 'learned'):
        table.add_column(name)
    for item in results:
        verdict = item.verdict
        ends = (
            (f'{verdict.first:.3f}', f'{verdict.last:.3f}', f'{verdict.standard_error:.3f}')
            if verdict
            else ('', '', '')
        )
        learned = 'yes' if item.has_passed else 'no' if item.status == 0 else f'status {item.status}'
        table.add_row(item.recipe, item.metric, str(len(item.curve)), *ends, f'{item.seconds:.0f}', learned)
    return table


def _plot(results: list[Result], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 (installed together with the cookbook)

    mpl.use('agg')
    from matplotlib import pyplot as plt  # noqa: PLC0415 (installed together with the cookbook)

    figure, axes = plt.subplots(3, 3, figsize=(11, 9), layout='constrained')
    for axis in axes.flat:
        axis.set_axis_off()
    for axis, item in zip(axes.flat, results, strict=False):
        axis.set_axis_on()
        axis.plot(item.curve, marker='.', color='tab:green' if RECIPES[item.recipe].is_rising else 'tab:blue')
        axis.set(title=item.recipe, xlabel='step', ylabel=item.metric.removeprefix('env/all/'))
        axis.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)
