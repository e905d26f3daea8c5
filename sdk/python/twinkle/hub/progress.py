"""Progress of long operations on standard error: bars on a terminal, otherwise lines."""

import sys
from collections.abc import Generator
from contextlib import contextmanager
from typing import Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn


class Report(Protocol):
    """Callback for the progress of an operation in stages."""

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        """Report that `done` of `total` units of `stage` are complete; `done == total` ends the stage."""
        ...


@contextmanager
def terminal_progress() -> Generator[Report]:
    """Yield a callback that shows progress on standard error until the block ends."""
    if not sys.stderr.isatty():
        yield _Lines()
        return
    columns = (
        TextColumn('{task.description}'),
        BarColumn(),
        TextColumn('{task.percentage:>3.0f}%'),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=Console(stderr=True, emoji=False)) as bars:
        yield _Bars(bars)


class _Lines:
    """Writes one line at the beginning of each stage."""

    def __init__(self) -> None:
        self._stages: set[str] = set()

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        if stage not in self._stages:
            self._stages.add(stage)
            sys.stderr.write(f'{stage} ...\n')


class _Bars:
    """Shows one bar per stage."""

    def __init__(self, bars: Progress) -> None:
        self._bars = bars
        self._tasks: dict[str, TaskID] = {}

    def __call__(self, stage: str, *, done: float, total: float) -> None:
        if stage not in self._tasks:
            self._tasks[stage] = self._bars.add_task(stage, total=total)
        self._bars.update(self._tasks[stage], completed=done, total=total)
