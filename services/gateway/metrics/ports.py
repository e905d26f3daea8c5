"""The store of metrics."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from services.gateway.catalogue.rules import EntryKey
from services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Report, Series


class MetricStore(Protocol):
    """Stores the points of runs.

    Each change of a run has a revision, which is larger than that of the previous one: the time of storage of its
    points in microseconds, or the next number if the clock of a gateway is late. A point is therefore new for a reader
    that knows all points up to a revision if its time is larger.
    """

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store points; a point with the name and step of a stored one replaces it, and the last of several counts.

        Raises:
            MetricsFull: the run would have more points than `limits` or `MAX_NAMES` names; nothing is stored.
            TenantMetricsFull: the runs of the tenant would have more points than `limits`; nothing is stored.
            RunDataDamaged: the stored points of the run cannot be read; nothing is stored.
        """
        ...

    async def save_reports(
        self, tenant_id: str, run_id: str, reports: Sequence[Report], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store the points of those reports that follow the last stored one, in one transaction.

        Raises:
            MetricsFull, TenantMetricsFull, RunDataDamaged: see `save`; nothing is stored.
        """
        ...

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name; see `MetricFilter`.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        ...

    async def revisions_of(self, runs: Collection[EntryKey]) -> Mapping[EntryKey, int]:
        """Return the newest revision of each run; 0 for a run without metrics. Runs that are not listed are absent."""
        ...

    async def list_changes(
        self, tenant_id: str, run_id: str, wanted: MetricFilter, *, after: int, until: int
    ) -> Sequence[Series] | None:
        """Return the selected points with revisions from `after` + 1 to `until`.

        Points that were replaced after `until` are omitted. Returns None if there are too many for an update.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        ...
