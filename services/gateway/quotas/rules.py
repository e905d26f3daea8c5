"""Quotas and usage of tenants, and token buckets. An unset limit has the value None."""

from dataclasses import dataclass, replace
from datetime import datetime

BURST_SECONDS = 10
"""The default burst is the number of tokens that the rate allows in this many seconds."""
MIN_WEIGHT, MAX_WEIGHT = 0.01, 100.0


@dataclass(frozen=True, kw_only=True)
class Quota:
    """Limits of one tenant, or the defaults of all tenants."""

    max_adapters: int | None = None
    """Maximum number of adapters at the same time."""
    tokens_per_second: int | None = None
    """Maximum long-term rate of trained, sampled and prompt tokens together."""
    burst_tokens: int | None = None
    """Tokens that may be used at once after a pause; None means `BURST_SECONDS` times the rate."""
    concurrent_samples: int | None = None
    """Maximum number of sampling requests at the same time."""
    stored_bytes: int | None = None
    """Maximum total size of checkpoints, datasets and uploaded files."""
    weight: float | None = None
    """Relative share when several tenants wait; None means 1."""
    metric_points: int | None = None
    """Maximum number of stored points of metrics."""

    def over(self, default: 'Quota') -> 'Quota':
        """Return this quota with unset limits taken from `default`."""
        return replace(default, **{name: limit for name, limit in vars(self).items() if limit is not None})

    @property
    def burst(self) -> float:
        """Tokens that may be used at once; meaningful only with a rate."""
        return float(self.burst_tokens or BURST_SECONDS * (self.tokens_per_second or 0))


@dataclass(frozen=True, kw_only=True)
class Work:
    """Counts of finished work; the sum of two values adds their counts."""

    trained_token_count: int = 0
    sampled_token_count: int = 0
    prompt_token_count: int = 0
    operation_count: int = 0
    """Training operations that consumed a sequence number."""
    prompt_count: int = 0
    """Prompts that were sampled from, and sequences that were scored."""

    def __add__(self, other: 'Work') -> 'Work':
        return Work(**{name: count + getattr(other, name) for name, count in vars(self).items()})

    @property
    def token_count(self) -> int:
        """Number of tokens of all kinds."""
        return self.trained_token_count + self.sampled_token_count + self.prompt_token_count


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A run's meter at the model service: totals since the run was created, which never decrease."""

    run_id: str
    tenant_id: str
    trained_token_count: int
    operation_count: int


@dataclass(frozen=True, kw_only=True)
class UsageBatch:
    """Usage that is recorded in one transaction, exactly once."""

    writer_id: str
    """Unique id of the process that counted the work."""
    number: int
    """Number of the batch, counted from 1 for each writer; a batch that is sent again is recorded once."""
    moment: datetime
    """UTC; selects the hour to which the work is added."""
    works: tuple[tuple[str, str, Work], ...] = ()
    """Tenant, run and work; each pair of tenant and run appears once."""
    readings: tuple[Reading, ...] = ()
    """Latest reading of each run."""


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage of one run of a tenant."""

    run_id: str
    """Empty for work on the base models alone, and for old usage of deleted runs."""
    work: Work
    stored_bytes: int
    """Current size of the run's checkpoints, or of the tenant's datasets and uploads if `run_id` is empty."""
    metric_point_count: int = 0
    """Current number of stored points of the run's metrics."""


@dataclass(frozen=True, kw_only=True)
class TimeRange:
    """A range of time that includes `begin` and excludes `end`; None means that there is no bound."""

    begin: datetime | None = None
    end: datetime | None = None


def hour_of(moment: datetime) -> datetime:
    """Return the start of a moment's hour."""
    return moment.replace(minute=0, second=0, microsecond=0)


class TokenBucket:
    """A tenant's rate limit: work is admitted while the level is not negative, and charged when its size is known.

    In any period, the tokens used are at most rate x time + burst + the work that was admitted but not yet charged.
    Times are seconds of any monotonic clock.

    Args:
        rate: tokens added per second, above 0.
        burst: maximum number of tokens that accumulate; the initial level.
        now: the current time.
    """

    def __init__(self, *, rate: float, burst: float, now: float) -> None:
        self._rate = rate
        self._burst = burst
        self._level = burst
        self._time = now

    def charge(self, count: int, *, now: float) -> None:
        """Take tokens; the level may become negative."""
        self._fill(now)
        self._level -= count

    def seconds_until_free(self, *, now: float) -> float:
        """Return the time until the level is no longer negative; 0.0 if it is not negative."""
        self._fill(now)
        return max(0.0, -self._level / self._rate)

    def change(self, *, rate: float, burst: float, now: float) -> None:
        """Change the rate and the burst; the level is reduced to the new burst if it is higher."""
        self._fill(now)
        self._rate, self._burst = rate, burst
        self._level = min(self._level, burst)

    def _fill(self, now: float) -> None:
        self._level = min(self._burst, self._level + self._rate * max(0.0, now - self._time))
        self._time = now
