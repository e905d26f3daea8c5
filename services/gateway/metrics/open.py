"""Wires metrics to a database, and creates the background jobs that store what the model services report."""

from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass

import grpc

from twinkle_services.gateway.catalogue.follow import FeedFollower, Job
from twinkle_services.gateway.catalogue.grpc import GrpcAdapterFeed
from twinkle_services.gateway.catalogue.runs import Runs, TenantTurns
from twinkle_services.gateway.metrics.collector import MetricCollector
from twinkle_services.gateway.metrics.convert import reports_of
from twinkle_services.gateway.metrics.metrics import Metrics
from twinkle_services.gateway.metrics.rules import PointLimits
from twinkle_services.gateway.metrics.sql import SqlMetricStore
from twinkle_services.gateway.metrics.watches import MetricWatches
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import Clock


@dataclass(frozen=True)
class OpenMetrics:
    """Metrics that are stored in a database, their watches, and the jobs that collect and poll them."""

    metrics: Metrics
    watches: MetricWatches
    jobs: list[Job]


@asynccontextmanager
async def open_metrics(
    database: Database,
    runs: Runs,
    models: Mapping[str, grpc.aio.Channel],
    *,
    clock: Clock,
    max_points: int,
    quota_of: Callable[[str], int | None],
) -> AsyncIterator[OpenMetrics]:
    """Yield the metrics of `runs`. Store the remaining reports after the block.

    Args:
        database: Database of the points.
        runs: Runs of all tenants.
        models: Internal channel to each model service by name.
        clock: Clock of the times of storage.
        max_points: Maximum number of points of each run.
        quota_of: Returns the maximum number of points of a tenant, or None for no limit.
    """

    def limits_of(tenant_id: str) -> PointLimits:
        return PointLimits(per_run=max_points, per_tenant=quota_of(tenant_id))

    store, turns = SqlMetricStore(database), TenantTurns()
    collector = MetricCollector(store, clock=clock, limits_of=limits_of)
    watches = MetricWatches(store, runs, turns=turns)
    followers = [
        FeedFollower(
            f'metrics of {name}',
            feed=GrpcAdapterFeed(channel, reports_of, is_reports_only=True),
            store=collector,
            clock=clock,
        )
        for name, channel in models.items()
    ]
    try:
        metrics = Metrics(store, runs, clock=clock, limits_of=limits_of, turns=turns)
        jobs: list[Job] = [collector.run_forever, watches.run_forever, *(follower.run for follower in followers)]
        yield OpenMetrics(metrics, watches, jobs)
    finally:
        await collector.close()
        store.close()
