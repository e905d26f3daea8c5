"""What is kept of the runs: `results.json`, a table and a drawing of the curves, over all recipes run so far."""

import json
import os
import platform
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Console
from rich.table import Table

from e2e.cookbook.judging import LEAST_STEPS, Verdict, judge
from e2e.cookbook.recipes import RECIPES

_FILE = 'result.json'


@dataclass(frozen=True, kw_only=True)
class Result:
    """One recipe's."""

    recipe: str
    status: int | None
    """Exit status; None: its time was over."""
    seconds: float
    engine: str
    metric: str
    curve: list[float]

    @property
    def verdict(self) -> Verdict | None:
        """What its curve says; None where it is too short to say anything."""
        is_rising = RECIPES[self.recipe].is_rising
        return judge(self.curve, is_rising=is_rising) if len(self.curve) >= LEAST_STEPS else None

    @property
    def is_good(self) -> bool:
        """Whether it came to its end and learned."""
        return self.status == 0 and self.verdict is not None and self.verdict.has_learned

    def save(self, folder: Path) -> None:
        """Write it down in the folder of its run."""
        (folder / _FILE).write_text(json.dumps(asdict(self), indent=2) + '\n', encoding='utf-8')


def write_report(runs: Path, folder: Path) -> None:
    """Show and keep what all recipes say that were ever run in `runs`."""
    results = [
        Result(**json.loads((runs / name / _FILE).read_text(encoding='utf-8')))
        for name in RECIPES
        if (runs / name / _FILE).is_file()
    ]
    hardware = {'machine': platform.machine(), 'cores': os.cpu_count()}
    told = [{**asdict(item), 'verdict': asdict(item.verdict) if item.verdict else None} for item in results]
    kept = json.dumps({'hardware': hardware, 'recipes': told}, indent=2)
    (folder / 'results.json').write_text(kept + '\n', encoding='utf-8')
    Console().print(_table(results))
    _draw(results, folder / 'curves.png')


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
        said = 'yes' if item.is_good else 'no' if item.status == 0 else f'ended with {item.status}'
        table.add_row(item.recipe, item.metric, str(len(item.curve)), *ends, f'{item.seconds:.0f}', said)
    return table


def _draw(results: list[Result], path: Path) -> None:
    import matplotlib as mpl  # noqa: PLC0415 - installed for this alone, beside the cookbook

    mpl.use('agg')
    from matplotlib import pyplot as plt  # noqa: PLC0415 - as above

    figure, axes = plt.subplots(2, 4, figsize=(13, 6), layout='constrained')
    for place in axes.flat:
        place.set_axis_off()
    for place, item in zip(axes.flat, results, strict=False):
        place.set_axis_on()
        place.plot(item.curve, marker='.', color='tab:green' if RECIPES[item.recipe].is_rising else 'tab:blue')
        place.set(title=item.recipe, xlabel='step', ylabel=item.metric.removeprefix('env/all/'))
        place.grid(alpha=0.3)
    figure.savefig(path, dpi=100)
    plt.close(figure)
