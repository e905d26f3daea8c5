"""Operations on metrics."""

import asyncio
from collections import OrderedDict
from collections.abc import Awaitable, Callable, Sequence

from services.gateway.catalogue.runs import Runs
from services.gateway.errors import RunNotFound
from services.gateway.metrics.rules import MetricFilter, Point, Series
from services.gateway.metrics.sql import SqlMetricStore
from services.kit.caller import Caller
from services.kit.clock import Clock
from services.kit.errors import QuotaExceeded

_CREATION_POLLS, _CREATION_SECONDS = 10, 0.2
"""Number of attempts to find a run, and the pause between them: the gateway learns of a new run after its creation."""
_CACHED_COUNTS = 10_000


class Metrics:
    """Stores and reads the metrics of a caller's runs."""

    def __init__(
        self,
        store: SqlMetricStore,
        runs: Runs,
        *,
        clock: Clock,
        max_points: int,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create metrics of `runs` with a maximum number of points of each run; `pause` sleeps for some seconds."""
        self._store = store
        self._runs = runs
        self._clock = clock
        self._max_points = max_points
        self._pause = pause
        self._counts = OrderedDict[tuple[str, str], int]()
        """Upper bounds of the points of recently logged runs. Other gateways and replaced points make them inexact."""

    async def log(self, caller: Caller, run_id: str, points: Sequence[Point]) -> None:
        """Store points of a run; a point with the name and step of a stored one replaces it.

        Raises:
            RunNotFound: the caller has no such run.
            QuotaExceeded: the run would have too many points.
        """
        await self._find(caller, run_id)
        key = (caller.tenant_id, run_id)
        count = self._counts.get(key, self._max_points) + len(points)
        if count > self._max_points:
            count = await self._store.count_with(*key, points)
        if count > self._max_points:
            raise QuotaExceeded('metric_points_per_run', self._max_points)
        await self._store.save(*key, points, moment=self._clock.now())
        self._counts[key] = count
        self._counts.move_to_end(key)
        if len(self._counts) > _CACHED_COUNTS:
            self._counts.popitem(last=False)

    async def get(self, caller: Caller, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name.

        Raises:
            RunNotFound: the caller has no such run.
        """
        await self._find(caller, run_id)
        return await self._store.list_of(caller.tenant_id, run_id, wanted)

    async def _find(self, caller: Caller, run_id: str) -> None:
        for _ in range(_CREATION_POLLS):
            try:
                await self._runs.get(caller, run_id)
            except RunNotFound:
                await self._pause(_CREATION_SECONDS)
            else:
                return
        await self._runs.get(caller, run_id)
