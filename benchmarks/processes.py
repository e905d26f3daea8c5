"""CPU time of the processes that a benchmark measures."""

from collections.abc import Iterable

import psutil


def with_children(*pids: int) -> list[psutil.Process]:
    """Return the processes and their current descendants, such as the engine of a sampler."""
    processes = map(psutil.Process, pids)
    return [member for process in processes for member in (process, *process.children(recursive=True))]


def busy_seconds(processes: Iterable[psutil.Process]) -> float:
    """Return the CPU time in seconds that the processes have used."""
    return sum(times.user + times.system for times in (process.cpu_times() for process in processes))
