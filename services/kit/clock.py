"""Time as a dependency, so that rules about time can be tested without waiting."""

import time
from datetime import UTC, datetime, timedelta
from typing import Protocol


class Clock(Protocol):
    """Tells the time."""

    def now(self) -> datetime:
        """Return the wall-clock time, in UTC."""
        ...

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        ...


class SystemClock:
    """The machine's clock."""

    def now(self) -> datetime:
        """Return the wall-clock time, in UTC."""
        return datetime.now(UTC)

    def monotonic(self) -> float:
        """Return seconds from an arbitrary start; never goes back."""
        return time.monotonic()


class FakeClock:
    """A clock that moves only when told to."""

    def __init__(self, start: datetime = datetime(2026, 1, 1, tzinfo=UTC)) -> None:
        """Begin at `start`."""
        self._now = start
        self._elapsed = timedelta()

    def now(self) -> datetime:
        """Return the start plus all that was advanced."""
        return self._now + self._elapsed

    def monotonic(self) -> float:
        """Return the seconds that were advanced."""
        return self._elapsed.total_seconds()

    def advance(self, step: timedelta) -> None:
        """Move forward by `step`."""
        self._elapsed += step
