"""Estimates the durations of batches and verbs from earlier ones."""

from datetime import timedelta

from services.model.domain.scheduler import VerbsAhead

_DECAY = 0.9
"""Decay of earlier values; with this factor, about the last ten values determine the mean."""


class Average:
    """An exponentially decaying mean; None before the first value."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """The mean."""
        return self._sum / self._weight if self._weight else None

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value."""
        self._sum = _DECAY * self._sum + weight * value
        self._weight = _DECAY * self._weight + weight


class Pace:
    """Mean durations of quick verbs, and of batches per token."""

    def __init__(self) -> None:
        """Start without measurements; all estimates are zero at first."""
        self._quick_seconds = Average()
        self._token_seconds = Average()
        self._mean_seconds = Average()

    @property
    def mean_time(self) -> timedelta:
        """Mean duration of a batch or a quick verb."""
        return timedelta(seconds=self._mean_seconds.value or 0.0)

    def observe(self, seconds: float, *, token_count: int) -> None:
        """Record the duration of a batch, or of a quick verb if `token_count` is 0."""
        self._mean_seconds.add(seconds)
        if token_count:
            self._token_seconds.add(seconds / token_count, weight=token_count)
        else:
            self._quick_seconds.add(seconds)

    def tokens_in(self, seconds: float) -> int | None:
        """Return the number of tokens that run in `seconds`; None before the first batch."""
        token = self._token_seconds.value
        return int(seconds / token) if token else None

    def estimate(self, ahead: VerbsAhead) -> timedelta:
        """Estimate the duration of the verbs ahead."""
        quick, token = self._quick_seconds.value or 0.0, self._token_seconds.value or 0.0
        return timedelta(seconds=ahead.quick_count * quick + ahead.token_count * token)
