"""Records a run: a progress bar, a line of JSON per step and rollout, other trackers, and a plot at the end."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict
from types import TracebackType
from typing import Any, Self

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.text import Text

from examples.cookbook.plots import plot_curves
from examples.cookbook.recipe import Recipe
from twinkle.tracking import JsonlBackend, MetricStore, TrackerBackend, open_tracker


class Curves:
    """Context manager that records the metrics of a run, with `twinkle.tracking`.

    On a terminal it shows a progress bar with the latest plotted metrics below it; otherwise it prints one line per
    step. Each step is written to `curves.jsonl` immediately, so an interrupted run keeps its results; `curves.json` has
    the setting and the status, and `curves.rollouts.jsonl` the rollouts of recipes that sample. The plot `curves.png`
    is drawn at the end, even after an interrupt.

    Args:
        recipe: Options of the run. Files of an earlier run in its output folder are replaced; the folder is created if
            necessary. Other trackers keep the earlier runs.
        title: Title of the plot and of the progress bar.
        total_steps: Number of calls to `record`.
        plotted: Names of the metrics to plot, one panel each.
        metrics: Store for the metrics of a run that trains on services; None for other runs.
    """

    def __init__(
        self,
        recipe: Recipe[Any],
        *,
        title: str,
        total_steps: int,
        plotted: Sequence[str],
        metrics: MetricStore | None = None,
    ) -> None:
        self._recipe, self._title, self._plotted = recipe, title, tuple(plotted)
        self._folder, self._metrics = recipe.out, metrics
        self._console = Console()
        self._bar = _bar(self._console)
        self._task = self._bar.add_task(title, total=total_steps)
        self._last: dict[str, float] = {}
        self.steps: list[dict[str, float]] = []
        """Metrics of all recorded steps, in order; `step` is the index of the step, from 0."""

    def __enter__(self) -> Self:
        for name in ('curves.jsonl', 'curves.json', 'curves.rollouts.jsonl'):
            (self._folder / name).unlink(missing_ok=True)
        others = [name for name in self._recipe.trackers if name != 'jsonl']
        backends: list[str | TrackerBackend] = [JsonlBackend(self._folder / 'curves.jsonl'), *others]
        self._tracker = open_tracker(
            backends if self._metrics is None else [*backends, 'service'],
            metrics=self._metrics,
            folder=self._folder,
            project=f'cookbook-{self._recipe.name}',
            name=self._title,
            config={'seed': self._recipe.seed, **asdict(self._recipe.setting)},
        )
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()
        self._tracker.__exit__(kind, error, trace)
        if self.steps:
            plot_curves(self.steps, self._plotted, title=self._title, path=self._folder / 'curves.png')
            print(f'curves: {self._folder}/curves.jsonl and curves.png')

    def log_rollouts(self, trajectories: Any, **facts: Any) -> None:
        """Record the rollouts of the next step, before its metrics.

        Args:
            trajectories: Completions, as in `Tracker.log_rollouts`.
            facts: Rewards, advantages and groups, as in `Tracker.log_rollouts`.
        """
        self._tracker.log_rollouts(trajectories, step=len(self.steps), **facts)

    def record(self, **numbers: float) -> None:
        """Record the metrics of the next step."""
        step = {'step': len(self.steps), **{name: float(value) for name, value in numbers.items()}}
        self._tracker.log(numbers, step=len(self.steps))
        self.steps.append(step)
        self._last |= {name: step[name] for name in self._plotted if name in step}
        self._bar.numbers = _shown(self._last)
        self._bar.update(self._task, advance=1)
        if not self._console.is_terminal:
            print(f'step {step["step"]:3}  {_shown(step)}', flush=True)


class _Bar(Progress):
    """A progress bar with a line of metrics below it."""

    numbers = ''

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        yield Text(self.numbers, style='cyan')


def _shown(numbers: dict[str, float]) -> str:
    return '  '.join(f'{name} {value:.4g}' for name, value in numbers.items() if name != 'step')


def _bar(console: Console) -> _Bar:
    columns = (
        TextColumn('{task.description}'),
        BarColumn(bar_width=24),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    return _Bar(*columns, console=console, disable=not console.is_terminal)
