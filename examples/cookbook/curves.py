"""A run's numbers as it goes: a progress bar to watch, a line of JSON for each step, and a plot at the end."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from examples.cookbook.plots import plot_curves


class Curves:
    """Records a run; a context manager.

    On a terminal a bar shows the last numbers; elsewhere each step prints a line. `curves.jsonl` has every step as
    soon as it was recorded, so a run that is interrupted keeps what it has; the plot is drawn in any case.

    Args:
        folder: made if it is not there; a former run's files in it are replaced.
        title: of the plot and the bar.
        total_steps: how many times `record` will be called.
        plotted: which numbers are drawn, one panel each.
    """

    def __init__(self, folder: Path, *, title: str, total_steps: int, plotted: Sequence[str]) -> None:
        self._folder, self._title, self._plotted = folder, title, tuple(plotted)
        self._console = Console()
        self._progress = _progress(self._console)
        self._task = self._progress.add_task(title, total=total_steps, numbers='')
        self.steps: list[dict[str, float]] = []
        """What was recorded, in order; each with its `step`."""

    def __enter__(self) -> Self:
        self._folder.mkdir(parents=True, exist_ok=True)
        self._lines = (self._folder / 'curves.jsonl').open('w')
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()
        self._lines.close()
        if self.steps:
            plot_curves(self.steps, self._plotted, title=self._title, path=self._folder / 'curves.png')
            print(f'curves: {self._folder}/curves.jsonl and curves.png')

    def record(self, **numbers: float) -> None:
        """Take the numbers of the next step."""
        step = {'step': len(self.steps), **{name: float(value) for name, value in numbers.items()}}
        self.steps.append(step)
        self._lines.write(json.dumps(step) + '\n')
        self._lines.flush()
        shown = '  '.join(f'{name} {value:.4g}' for name, value in step.items() if name != 'step')
        self._progress.update(self._task, advance=1, numbers=shown)
        if not self._console.is_terminal:
            print(f'step {step["step"]:3}  {shown}', flush=True)


def _progress(console: Console) -> Progress:
    columns = (
        TextColumn('{task.description}'),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
        TextColumn('{task.fields[numbers]}'),
    )
    return Progress(*columns, console=console, disable=not console.is_terminal)
