"""Processes by id: whether one is still the same, how much memory it holds, how to end it."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

_POLL_SECONDS = 0.05


def start_mark(pid: int) -> str:
    """Return what tells a process from a later one with the same id; empty if there is none."""
    if sys.platform == 'linux':
        try:
            # Field 22 is the start time; the name in field 2 may hold spaces and parentheses.
            fields = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8').rpartition(')')[2].split()
        except OSError:
            return ''
        return '' if fields[0] == 'Z' else fields[19]
    return _ps(pid, 'lstart')


def is_same_process(pid: int, mark: str) -> bool:
    """Return whether the process that had `mark` lives."""
    return bool(mark) and start_mark(pid) == mark


def resident_bytes(pid: int) -> int:
    """Return a process's resident memory; 0 where it cannot be read."""
    kilobytes = _ps(pid, 'rss')
    return int(kilobytes) * 1024 if kilobytes.isdigit() else 0


def end_process(pid: int, mark: str, *, grace_seconds: float) -> bool:
    """Ask a process to end, and end it if it does not in time.

    Args:
        pid: its id.
        mark: of the process meant; another one with that id is left alone.
        grace_seconds: how long it may take.

    Returns:
        Whether it went by itself.
    """
    if not is_same_process(pid, mark):
        return True
    os.kill(pid, signal.SIGTERM)
    if _wait_for_end(pid, mark, grace_seconds):
        return True
    os.kill(pid, signal.SIGKILL)
    _wait_for_end(pid, mark, grace_seconds)
    return False


def _wait_for_end(pid: int, mark: str, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while is_same_process(pid, mark):
        if time.monotonic() > end:
            return False
        time.sleep(_POLL_SECONDS)
    return True


def _ps(pid: int, column: str) -> str:
    result = subprocess.run(
        ['ps', '-o', f'{column}=', '-p', str(pid)],  # noqa: S607 - where ps is differs between systems
        capture_output=True,
        text=True,
        check=False,
    )
    return result.stdout.strip()
