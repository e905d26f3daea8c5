"""The clock as a dependency, so that time-dependent code can be tested without waiting."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """A source of the current time."""

    def now(self) -> datetime:
        """Return the wall-clock time, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; the value never decreases."""
        ...


class SystemClock:
    """The clock of the operating system."""

    def now(self) -> datetime:
        """Return the wall-clock time, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds since an arbitrary start; the value never decreases."""
        return time.monotonic()


class FakeClock:
    """A clock whose time changes only through `advance`."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        self._now = start
        self._elapsed = timedelta()

    def now(self) -> datetime:
        """Return the start plus the steps of all calls of `advance`."""
        return self._now + self._elapsed

    def monotonic(self) -> float:
        """Return the sum of the steps of all calls of `advance`, in seconds."""
        return self._elapsed.total_seconds()

    def advance(self, step: timedelta) -> None:
        """Move the clock forward by `step`."""
        self._elapsed += step
