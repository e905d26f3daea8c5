"""Points of metrics, filters for lists of them, and changes that watchers receive."""

from collections.abc import Sequence
from dataclasses import dataclass

MAX_NAME_LENGTH = 128
MAX_STEP = 2**53 - 1
"""Largest step, which every language can represent."""
MAX_LOGGED = 1000
"""Maximum number of points in a request."""
MAX_NAMES = 1000
"""Maximum number of metrics of a run."""
MAX_LISTED_NAMES = 100
"""Maximum number of names in a filter."""
DEFAULT_POINTS, MAX_POINTS = 1000, 10_000
"""Default and maximum number of points of each metric in a list."""
MAX_LISTED = 100_000
"""Maximum number of points in a list of all metrics together."""
MAX_WATCHED = 20
"""Maximum number of runs in a watch."""
MAX_WATCHES = 100
"""Maximum number of a tenant's watches at one gateway. A watch whose client does not read occupies about 2.5 MB."""


@dataclass(frozen=True)
class Point:
    """Value of a metric at one step."""

    name: str
    step: int
    value: float
    """May be infinite or NaN."""


@dataclass(frozen=True, kw_only=True)
class Report:
    """Points of one step that the model service reported for an operation."""

    sequence_number: int
    """Number of the operation; the reports of a run have ascending numbers."""
    points: Sequence[Point]


@dataclass(frozen=True, kw_only=True)
class RunReports:
    """The last reports of a run, by ascending number."""

    tenant_id: str
    run_id: str
    reports: Sequence[Report]


@dataclass(frozen=True, kw_only=True)
class Series:
    """Points of one metric, by ascending step."""

    name: str
    steps: Sequence[int]
    values: Sequence[float]
    times_us: Sequence[int]
    """Time at which each point was stored, in microseconds since 1970-01-01 UTC."""
    point_count: int
    """Number of stored points; larger than the number of listed points if the metric was reduced."""


@dataclass(frozen=True, kw_only=True)
class PointLimits:
    """Maximum numbers of stored points."""

    per_run: int
    per_tenant: int | None = None
    """Maximum of all runs of the tenant together; None for no limit."""


@dataclass(frozen=True, kw_only=True)
class MetricUpdate:
    """Points of a run that a watcher receives."""

    run_id: str
    series: Sequence[Series]
    is_snapshot: bool
    """Whether these are all selected points of the run. They then replace the points that the watcher has."""
    revision: int
    """Revision of the run up to which the watcher then has all points; see `SqlMetricStore`."""


@dataclass(frozen=True, kw_only=True)
class MetricFilter:
    """Filter for the points of a run."""

    names: Sequence[str] = ()
    """Metrics to list; empty for all."""
    begin_step: int = 0
    end_step: int | None = None
    """First step that is not listed; None for no limit."""
    max_points: int = DEFAULT_POINTS
    """Maximum number of points of each metric, at least 2."""


def is_metric_name(name: str) -> bool:
    """Return whether a metric may have this name: printable ASCII without spaces, not empty and not too long."""
    return 0 < len(name) <= MAX_NAME_LENGTH and all('!' <= character <= '~' for character in name)


def fits(series: Sequence[Series], wanted: MetricFilter) -> bool:
    """Return whether changed points are few enough for one update; otherwise, the update is a snapshot."""
    counts = [len(one.steps) for one in series]
    return max(counts, default=0) <= wanted.max_points and sum(counts) <= MAX_LISTED


def selected_after(series: Sequence[Series], wanted: MetricFilter, *, revision: int) -> list[Series]:
    """Return the points that a filter selects and that were stored after a revision."""
    found = [_after(one, wanted, revision) for one in series if not wanted.names or one.name in wanted.names]
    return [one for one in found if one.point_count]


def _after(series: Series, wanted: MetricFilter, revision: int) -> Series:
    times = zip(series.steps, series.times_us, strict=True)
    kept = [index for index, (step, time) in enumerate(times) if time > revision and step >= wanted.begin_step]
    return Series(
        name=series.name,
        steps=[series.steps[index] for index in kept],
        values=[series.values[index] for index in kept],
        times_us=[series.times_us[index] for index in kept],
        point_count=len(kept),
    )
