"""Processes by id: identity, memory usage and termination."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

_POLL_SECONDS = 0.05


def start_mark(pid: int) -> str:
    """Return a mark that distinguishes a process from a later process with the same id; empty if it does not run."""
    if sys.platform == 'linux':
        try:
            # Field 22 is the start time; the name in field 2 may contain spaces and parentheses.
            fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8').rpartition(')')[2].split()
        except OSError:
            return ''
        return '' if fields[0] == 'Z' else fields[19]
    return _ps('-o', 'lstart=', '-p', str(pid))


def is_same_process(pid: int, mark: str) -> bool:
    """Return whether the process with this id and mark is running."""
    return bool(mark) and start_mark(pid) == mark


def resident_bytes(pid: int) -> int:
    """Return the resident memory of a process and its descendants; 0 if it cannot be read.

    Shared memory is counted once per process.
    """
    rows = list(_LISTINGS.get(sys.platform, _ps_processes)())
    parents = {row[0]: row[1] for row in rows}
    return sum(size for item, _, size in rows if pid in _ancestry(item, parents))


def _linux_processes() -> Iterator[tuple[int, int, int]]:
    """Yield id, parent and resident bytes of every process, without `ps`, which minimal images lack."""
    page_bytes = os.sysconf('SC_PAGE_SIZE')
    for folder in Path('/proc').glob('[0-9]*'):
        try:
            stat = (folder / 'stat').read_text(encoding='utf-8').rpartition(')')[2].split()
        except OSError:
            continue
        yield int(folder.name), int(stat[1]), int(stat[21]) * page_bytes


def _ps_processes() -> Iterator[tuple[int, int, int]]:
    for line in _ps('-e', '-o', 'pid=,ppid=,rss=').splitlines():
        pid, parent, kibibytes = line.split()
        yield int(pid), int(parent), int(kibibytes) * 1024


_LISTINGS = {'linux': _linux_processes}


def _ancestry(pid: int, parents: dict[int, int]) -> list[int]:
    """Return a process and its ancestors."""
    ancestry: list[int] = []
    while pid and pid not in ancestry:
        ancestry.append(pid)
        pid = parents.get(pid, 0)
    return ancestry


def end_process(pid: int, mark: str, *, grace_seconds: float) -> bool:
    """Terminate a process, and kill it if it does not exit in time.

    Args:
        pid: Process id.
        mark: Mark of the process; a different process with the same id is not signalled.
        grace_seconds: Time between SIGTERM and SIGKILL.

    Returns:
        False if the process had to be killed.
    """
    if not is_same_process(pid, mark):
        return True
    _signal(pid, signal.SIGTERM)
    if _wait_for_end(pid, mark, grace_seconds):
        return True
    _signal(pid, signal.SIGKILL)
    _wait_for_end(pid, mark, grace_seconds)
    return False


def _signal(pid: int, number: signal.Signals) -> None:
    # The process may have exited after the check.
    with suppress(ProcessLookupError):
        os.kill(pid, number)


def _wait_for_end(pid: int, mark: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_same_process(pid, mark):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _ps(*arguments: str) -> str:
    result = subprocess.run(
        ['ps', *arguments],  # noqa: S607 - the path of ps differs between systems
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip()
