"""Bars that show how far bytes have come, on a terminal; elsewhere nothing is shown."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from twinkle_client.archives import ReportBytes


@contextmanager
def byte_progress(what: str, *, is_shown: bool = True) -> Iterator[ReportBytes]:
    """Give what is told how many bytes are done, of how many; the bar goes when the block ends.

    Args:
        what: is under way, in a word.
        is_shown: whether somebody waits for it.
    """
    console = Console(stderr=True)
    columns = (TextColumn('{task.description}'), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_disabled = not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_disabled) as progress:
        task = progress.add_task(what, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None)

        yield report
