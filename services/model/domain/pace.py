"""Estimates the durations of batches and verbs, and the arrival times of operations, from earlier measurements."""

from collections import OrderedDict
from datetime import timedelta

from twinkle_services.model.domain.scheduler import VerbsAhead

_DECAY = 0.9
"""Decay of earlier values; with this factor, about the last ten values determine the mean."""
_MAX_ADAPTERS = 512
"""Maximum number of adapters with stored think times; larger than the number of adapters that share a pass."""
_SPREAD = 2.0
"""An adapter's next operation is no longer expected after this many times the adapter's mean think time."""


class Average:
    """An exponentially decaying mean of values."""

    def __init__(self) -> None:
        self._sum = 0.0
        self._weight = 0.0

    @property
    def value(self) -> float | None:
        """The mean; None before the first value."""
        return self._sum / self._weight if self._weight else None

    def add(self, value: float, weight: float = 1.0) -> None:
        """Add a value, which counts as much as `weight` values of weight 1."""
        self._sum = _DECAY * self._sum + weight * value
        self._weight = _DECAY * self._weight + weight


class Pace:
    """Mean durations of a quick verb (a verb without tokens) and of one token of a batch."""

    def __init__(self) -> None:
        """Start without measurements; the estimated durations are zero at first."""
        self._quick_seconds = Average()
        self._token_seconds = Average()
        self._mean_seconds = Average()

    @property
    def mean_time(self) -> timedelta:
        """Mean duration over batches and quick verbs; zero before the first measurement."""
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


class ThinkTimes:
    """Think times: the time from an adapter's result to its next operation. Times are seconds of one clock."""

    def __init__(self) -> None:
        self._mean: OrderedDict[str, Average] = OrderedDict()
        self._finish_times: dict[str, float] = {}

    def record_finish(self, adapter_id: str, now: float) -> None:
        """Record that an adapter's operation finished."""
        self._finish_times[adapter_id] = now
        self._mean.setdefault(adapter_id, Average())
        self._mean.move_to_end(adapter_id)
        if len(self._mean) > _MAX_ADAPTERS:
            oldest, _ = self._mean.popitem(last=False)
            self._finish_times.pop(oldest, None)

    def record_arrival(self, adapter_id: str, now: float) -> None:
        """Record that an adapter's next operation arrived."""
        finish_time = self._finish_times.pop(adapter_id, None)
        if finish_time is not None:
            self._mean[adapter_id].add(now - finish_time)

    def latest_expected(self, now: float, *, limit: float) -> float:
        """Return the latest time at which an expected operation arrives; `now` if no operation is expected.

        Only adapters with a mean think time of at most `limit` seconds are considered.
        """
        last = now
        for adapter_id, finish_time in self._finish_times.items():
            mean = self._mean[adapter_id].value
            if mean is not None and mean <= limit:
                last = max(last, finish_time + _SPREAD * mean)
        return last
