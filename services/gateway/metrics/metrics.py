"""Operations on metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from services.gateway.catalogue.runs import Runs
from services.gateway.errors import RunNotFound
from services.gateway.metrics.ports import MetricStore
from services.gateway.metrics.rules import MetricFilter, Point, Series
from services.kit.caller import Caller
from services.kit.clock import Clock

_CREATION_PAUSES = (0.05, 0.1, 0.2, 0.4, 0.8)
"""Pauses in seconds between attempts to find a run, because the gateway learns of a new run after its creation."""


class Metrics:
    """Stores and reads the metrics of a caller's runs."""

    def __init__(
        self,
        store: MetricStore,
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

    async def log(self, caller: Caller, run_id: str, points: Sequence[Point]) -> None:
        """Store points of a run; a point with the name and step of a stored one replaces it.

        Raises:
            RunNotFound: the caller has no such run.
            MetricsFull: the run would have too many points or names; nothing is stored.
        """
        for pause in _CREATION_PAUSES:
            try:
                await self._runs.get(caller, run_id)
                break
            except RunNotFound:
                await self._pause(pause)
        else:
            await self._runs.get(caller, run_id)
        moment = self._clock.now()
        await self._store.save(caller.tenant_id, run_id, points, moment=moment, max_points=self._max_points)

    async def get(self, caller: Caller, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name.

        Raises:
            RunNotFound: the caller has no such run.
        """
        await self._runs.get(caller, run_id)
        return await self._store.list_of(caller.tenant_id, run_id, wanted)
