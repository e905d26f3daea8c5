"""Operations on metrics, and the jobs that store what the model services report."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager

import grpc

from twinkle_services.gateway.catalogue.follow import adapter_jobs
from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns, find_new_run
from twinkle_services.gateway.metrics.collector import MetricCollector
from twinkle_services.gateway.metrics.convert import reports_of
from twinkle_services.gateway.metrics.rules import MetricFilter, Point, PointLimits, Series
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.gateway.metrics.watches import MetricWatches
from twinkle_services.gateway.sessions.sweep import Job
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import Clock


class Metrics:
    """Stores and reads the metrics of a caller's runs."""

    def __init__(
        self,
        store: SqlMetricStore,
        runs: Runs,
        *,
        clock: Clock,
        limits_of: Callable[[str], PointLimits],
        turns: TenantTurns,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        """Create metrics of `runs`; `turns` serializes the reads of each tenant, including those of watches."""
        self._store = store
        self._runs = runs
        self._clock = clock
        self._limits_of = limits_of
        self._turns, self._log_turns = turns, TenantTurns()
        self._pause = pause

    async def log(self, caller: Caller, run_id: str, points: Sequence[Point]) -> None:
        """Store points of a run; a point with the name and step of a stored point replaces that point.

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


@asynccontextmanager
async def open_metrics(
    database: Database,
    runs: Runs,
    models: Mapping[str, grpc.aio.Channel],
    *,
    clock: Clock,
    max_points: int,
    quota_of: Callable[[str], int | None],
) -> AsyncIterator[tuple[Metrics, MetricWatches, list[Job]]]:
    """Yield the metrics of `runs`, their watches, and the jobs that collect reports and poll for watches.

    Store the remaining reports after the block. `models` contains an internal channel to each model service by name. A
    run may have at most `max_points` points, and all runs of a tenant together the number that `quota_of` returns;
    None means no limit.
    """

    def limits_of(tenant_id: str) -> PointLimits:
        return PointLimits(per_run=max_points, per_tenant=quota_of(tenant_id))

    store, turns = SqlMetricStore(database), TenantTurns()
    collector = MetricCollector(store, clock=clock, limits_of=limits_of)
    watches = MetricWatches(store, runs, turns=turns)
    copies = [(reports_of, collector)]
    jobs = adapter_jobs('metrics', models, lambda _: copies, clock=clock, is_reports_only=True)
    try:
        metrics = Metrics(store, runs, clock=clock, limits_of=limits_of, turns=turns)
        yield metrics, watches, [collector.run_forever, watches.run_forever, *jobs]
    finally:
        await collector.close()
        store.close()
