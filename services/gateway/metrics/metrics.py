"""Operations on metrics."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns, find_new_run
from twinkle_services.gateway.metrics.ports import MetricStore
from twinkle_services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Series
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock


class Metrics:
    """Stores and reads the metrics of a caller's runs."""

    def __init__(
        self,
        store: MetricStore,
        runs: Runs,
        *,
        clock: Clock,
        limits_of: Callable[[str], PointLimits],
        turns: TenantTurns,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create metrics of `runs`.

        Args:
            store: store of the points.
            runs: runs of all tenants.
            clock: clock of the times of storage.
            limits_of: returns the limits of a tenant.
            turns: locks that serialize the reads of each tenant; watches use the same locks.
            pause: sleeps for some seconds.
        """
        self._store = store
        self._runs = runs
        self._clock = clock
        self._limits_of = limits_of
        self._turns, self._log_turns = turns, TenantTurns()
        self._pause = pause

    async def log(self, caller: Caller, run_id: str, points: Sequence[Point]) -> None:
        """Store points of a run; a point with the name and step of a stored one replaces it.

        Raises:
            RunNotFound: the caller has no such run.
            MetricsFull: the run would have too many points or names; nothing is stored.
            TenantMetricsFull: the runs of the tenant would have too many points; nothing is stored.
        """
        await find_new_run(self._runs, caller, run_id, pause=self._pause)
        async with self._log_turns.of(caller.tenant_id):
            moment, limits = self._clock.now(), self._limits_of(caller.tenant_id)
            await self._store.save(caller.tenant_id, run_id, points, moment=moment, limits=limits)

    async def get(self, caller: Caller, run_id: str, wanted: MetricFilter) -> Sequence[Series]:
        """Return the metrics of a run by name.

        Raises:
            RunNotFound: the caller has no such run.
        """
        await self._runs.get(caller, run_id)
        async with self._turns.of(caller.tenant_id):
            return await self._store.list_of(caller.tenant_id, run_id, wanted)
