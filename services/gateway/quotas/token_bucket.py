"""A rate: work is let in while nothing is owed, and paid for when it is known what it took.

Nobody has to guess in advance how much a piece of work takes. Over time no more is used than the rate allows;
what was let in before it was paid for is the most that goes beyond it.
"""


class TokenBucket:
    """The account of one tenant. Pure: the time is always passed in, in seconds on any clock that never goes back."""

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        """Begin with as much as is ever there.

        Args:
            rate: tokens that come in a second, above 0.
            burst: most tokens that gather.
            now: the time.
        """
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._time = now

    def charge(self, count: int, *, now: float) -> None:
        """Take tokens out, also such as are not there."""
        self._fill(now)
        self._level -= count

    def seconds_until_free(self, *, now: float) -> float:
        """Return how long it takes until nothing is owed; 0.0 where nothing is."""
        self._fill(now)
        return max(0.0, -self._level / self._rate)

    def change(self, *, rate: float, burst: float, now: float) -> None:
        """Go on at another rate; what is owed stays."""
        self._fill(now)
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + self._rate * max(0.0, now - self._time))
        self._time = now
