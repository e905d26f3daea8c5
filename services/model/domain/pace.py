"""How long work takes here, learnt from what ran. Pure."""

from datetime import timedelta

from services.model.domain.scheduler import Ahead

_MEMORY = 0.9
"""What the past counts for beside the newest: about the last ten."""


class Average:
    """A mean in which the newest counts most; None before the first."""

    def __init__(self) -> None:
        """Begin with nothing."""
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """The mean."""
        return self._sum / self._weight if self._weight else None

    def add(self, value: float, weight: float = 1.0) -> None:
        """Count a value."""
        self._sum = _MEMORY * self._sum + weight * value
        self._weight = _MEMORY * self._weight + weight


class Pace:
    """Times of quick works, and of batches by their tokens."""

    def __init__(self) -> None:
        """Know nothing: every estimate is zero."""
        self._quick_seconds = Average()
        self._token_seconds = Average()
        self._mean_seconds = Average()

    @property
    def mean_time(self) -> timedelta:
        """How long a batch or a quick work takes, whichever it is."""
        return timedelta(seconds=self._mean_seconds.value or 0.0)

    def observe(self, seconds: float, *, token_count: int) -> None:
        """Learn from a batch that ran, or from a quick work, which has no tokens."""
        self._mean_seconds.add(seconds)
        if token_count:
            self._token_seconds.add(seconds / token_count, weight=token_count)
        else:
            self._quick_seconds.add(seconds)

    def tokens_in(self, seconds: float) -> int | None:
        """Return how many tokens run in so long; None where none ran yet."""
        token = self._token_seconds.value
        return int(seconds / token) if token else None

    def estimate(self, ahead: Ahead) -> timedelta:
        """Return how long what is ahead takes."""
        quick, token = self._quick_seconds.value or 0.0, self._token_seconds.value or 0.0
        return timedelta(seconds=ahead.quick_count * quick + ahead.token_count * token)
