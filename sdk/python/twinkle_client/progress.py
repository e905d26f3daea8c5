"""Progress bars for transfers, shown on terminals only."""

from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn

from twinkle_client.archives import ReportBytes


@contextmanager
def byte_progress(description: str, *, is_shown: bool = True) -> Iterator[ReportBytes]:
    """Show a progress bar while the block runs, and provide the function that updates it.

    Args:
        description: Text next to the bar.
        is_shown: False disables the bar, for example when the program does not block on the transfer.
    """
    console = Console(stderr=True, emoji=False)
    columns = (TextColumn('{task.description}'), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    is_disabled = not (is_shown and console.is_terminal)
    with Progress(*columns, console=console, transient=True, disable=is_disabled) as progress:
        task = progress.add_task(description, total=None)

        def report(done: int, total: int) -> None:
            progress.update(task, completed=done, total=total or None)

        yield report
