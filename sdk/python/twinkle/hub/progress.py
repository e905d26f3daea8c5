"""Progress of long work, shown on the terminal: a bar where there is one, lines elsewhere."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Told how far a stage of the work is."""

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        """Say that `done` of `total` parts of `stage` are behind us; `done == total` ends the stage."""
        ...


@contextmanager
def terminal_progress() -> Generator[Report]:
    """Show progress on standard error until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        TextColumn('{task.percentage:>3.0f}%'),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True)) as bars:
        yield _Bars(bars)


class _Lines:
    """One line when a stage begins."""

    def __init__(self) -> None:
        self._stages: set[str] = set()

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            sys.stderr.write(f'{stage} ...\n')


class _Bars:
    """One bar a stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
