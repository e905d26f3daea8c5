"""The store of metrics."""

from collections.abc import Collection, Mapping, Sequence
from datetime import datetime
from typing import Protocol

from twinkle_services.gateway.catalogue.rules import EntryKey
from twinkle_services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Report, Series


class MetricStore(Protocol):
    """Stores the points of runs.

    Each change of a run's points has a revision: the time of the change in microseconds, or the previous revision plus
    one if that is larger, because clocks of gateways may differ. A reader that has all points up to a revision lacks
    only points with a larger time of storage.
    """

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store points; a point replaces a stored or earlier point with the same name and step.

        Raises:
            MetricsFull: the run would have more points than `limits` or `MAX_NAMES` names; nothing is stored.
            TenantMetricsFull: the runs of the tenant would have more points than `limits`; nothing is stored.
            RunDataDamaged: the stored points of the run cannot be read; nothing is stored.
        """
        ...

    async def save_reports(
        self, tenant_id: str, run_id: str, reports: Sequence[Report], *, moment: datetime, limits: PointLimits
    ) -> None:
        """Store the points of the reports that follow the last stored report, in one transaction.

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

        Points that were replaced after `until` are omitted. Return None if there are too many points for an update.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        ...
