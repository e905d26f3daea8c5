"""The order of one lane: which position may run next, and when to give up one that does not come.

Pure: it decides, and never waits or runs anything. `application.futures.runner` asks it.
"""

from enum import Enum, auto

from services.gateway.futures.rules import Future


class Place(Enum):
    """What is to become of a future that came."""

    TAKEN = auto()
    """It waits for its turn."""
    KNOWN = auto()
    """It is here already."""
    PASSED = auto()
    """The lane has gone on without its position."""


class Lane:
    """Futures of one lane. One at a time runs, in the order of positions; each is ended before the next begins."""

    def __init__(self, next_position: int = 0, *, now: float) -> None:
        """Begin at `next_position`; all before it are finished or were given up.

        Args:
            next_position: the first one that is not finished.
            now: seconds on the caller's clock, as in all other verbs.
        """
        self.next_position = next_position
        self._waiting: dict[int, Future] = {}
        self._came: dict[int, float] = {}
        self._running: str | None = None
        self._idle_since = now

    @property
    def is_running(self) -> bool:
        """Whether one has begun and not ended."""
        return self._running is not None

    @property
    def waiting_count(self) -> int:
        """How many wait for their turn."""
        return len(self._waiting)

    def idle_since(self) -> float | None:
        """Return since when nothing runs or waits; None where something does."""
        return None if self._running is not None or self._waiting else self._idle_since

    def add(self, future: Future, *, now: float) -> Place:
        """Take a future in, whenever it comes; say what becomes of it."""
        waiting = self._waiting.get(future.position)
        if future.future_id in (self._running, waiting.future_id if waiting else None):
            return Place.KNOWN
        # Two futures at one position would be two requests; the one that came first has it.
        if future.position < self.next_position + self.is_running or waiting is not None:
            return Place.PASSED
        self._waiting[future.position] = future
        self._came[future.position] = now
        return Place.TAKEN

    def begin(self) -> Future | None:
        """Return the future that runs from now on; None where one runs, or the next one is not here."""
        if self._running is not None or self.next_position not in self._waiting:
            return None
        future = self._take(self.next_position)
        self._running = future.future_id
        return future

    def end(self, *, now: float) -> None:
        """Go on to the next position: the one that ran is finished, whatever came of it."""
        self._running = None
        self.next_position += 1
        self._idle_since = now

    def skip_to(self, position: int) -> list[Future]:
        """Go on at `position` at least, where nothing runs: all before it are finished. Return those passed thereby."""
        self.next_position = max(self.next_position, position)
        passed = [waiting for waiting in sorted(self._waiting) if waiting < self.next_position]
        return [self._take(waiting) for waiting in passed]

    def gap_ends(self, patience: float) -> float | None:
        """Return when to give up the position that all others wait for; None where there is none such.

        Args:
            patience: seconds that the first one in waiting waits, from when it came or the lane fell idle.
        """
        if self._running is not None or not self._waiting or self.next_position in self._waiting:
            return None
        return max(self._came[min(self._waiting)], self._idle_since) + patience

    def give_up(self) -> list[Future]:
        """Return, in order, those that directly follow the gap, which are to fail; `end` them together.

        They were sent to run after what is missing, and would do something else without it.
        """
        position = min(self._waiting)
        failed: list[Future] = []
        while position in self._waiting:
            failed.append(self._take(position))
            position += 1
        self._running = failed[-1].future_id
        self.next_position = failed[-1].position
        return failed

    def _take(self, position: int) -> Future:
        del self._came[position]
        return self._waiting.pop(position)
