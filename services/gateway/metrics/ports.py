"""The store of metrics."""

from collections.abc import Sequence
from datetime import datetime
from typing import Protocol

from services.gateway.metrics.rules import MetricFilter, Point, Report, Series


class MetricStore(Protocol):
    """Stores the points of runs."""

    async def save(
        self, tenant_id: str, run_id: str, points: Sequence[Point], *, moment: datetime, max_points: int
    ) -> None:
        """Store points; a point with the name and step of a stored one replaces it, and the last of several counts.

        Raises:
            MetricsFull: the run would have more than `max_points` points or `MAX_NAMES` names; nothing is stored.
            RunDataDamaged: the stored points of the run cannot be read; nothing is stored.
        """
        ...

    async def save_reports(
        self, tenant_id: str, run_id: str, reports: Sequence[Report], *, moment: datetime, max_points: int
    ) -> None:
        """Store the points of those reports that follow the last stored one, in one transaction.

        Raises:
            MetricsFull, RunDataDamaged: see `save`; nothing is stored.
        """
        ...

    async def list_of(self, tenant_id: str, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name; see `MetricFilter`.

        Raises:
            RunDataDamaged: the stored points of the run cannot be read.
        """
        ...
