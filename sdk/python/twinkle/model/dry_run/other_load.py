"""Load of other processes on the machine's processors."""

import os
import time
from dataclasses import dataclass
from pathlib import Path

_STAT = Path('/proc/stat')
_IDLE_FIELDS = (3, 4)
"""Positions of the times in which the processors were idle, or waited for disks."""
_TIME_FIELDS = 8
"""Number of times in a line; the later ones are contained in earlier ones."""


@dataclass(frozen=True, kw_only=True)
class ProcessorTimes:
    """Processor time, in seconds, since arbitrary starts; only differences have a meaning."""

    total: float
    """Time of all processors."""
    busy: float
    """Time in which processors worked."""
    own: float
    """Processor time of this process."""

    @classmethod
    def now(cls) -> 'ProcessorTimes':
        """Return the current times; all but `own` are 0 if the system does not report them."""
        try:
            text = _STAT.read_text(encoding='ascii')
        except OSError:
            text = 'cpu'
        total, busy = parse_stat(text)
        return cls(total=total, busy=busy, own=time.process_time())

    def __add__(self, other: 'ProcessorTimes') -> 'ProcessorTimes':
        return ProcessorTimes(total=self.total + other.total, busy=self.busy + other.busy, own=self.own + other.own)

    def __sub__(self, other: 'ProcessorTimes') -> 'ProcessorTimes':
        return ProcessorTimes(total=self.total - other.total, busy=self.busy - other.busy, own=self.own - other.own)

    @property
    def other_share(self) -> float:
        """Share of the processors' time, in [0, 1], that other processes used."""
        return max(0.0, self.busy - self.own) / self.total if self.total > 0 else 0.0


def parse_stat(text: str) -> tuple[float, float]:
    """Return the total time and the busy time of all processors, in seconds, from the text of `/proc/stat`."""
    ticks = [int(value) for value in text.partition('\n')[0].split()[1 : 1 + _TIME_FIELDS]]
    idle = sum(ticks[index] for index in _IDLE_FIELDS if index < len(ticks))
    second = os.sysconf('SC_CLK_TCK')
    return sum(ticks) / second, (sum(ticks) - idle) / second
