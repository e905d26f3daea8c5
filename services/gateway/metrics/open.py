"""Wires metrics to a database, and creates the background jobs that store what the model services report."""

from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc

from services.gateway.catalogue.follow import FeedFollower
from services.gateway.catalogue.grpc import GrpcAdapterFeed
from services.gateway.catalogue.runs import Runs
from services.gateway.metrics.collector import MetricCollector
from services.gateway.metrics.convert import reports_of
from services.gateway.metrics.metrics import Metrics
from services.gateway.metrics.sql import SqlMetricStore
from services.gateway.store.database import Database
from services.kit.clock import Clock

Job = Callable[[], Coroutine[Any, Any, Any]]


@dataclass(frozen=True)
class OpenMetrics:
    """Metrics that are stored in a database, and the jobs that collect them."""

    metrics: Metrics
    jobs: list[Job]


@asynccontextmanager
async def open_metrics(
    database: Database, runs: Runs, models: Mapping[str, grpc.aio.Channel], *, clock: Clock, max_points: int
) -> AsyncIterator[OpenMetrics]:
    """Yield the metrics of `runs`, with at most `max_points` points each. Store the remaining reports after the block.

    `models` contains an internal channel to each model service by name.
    """
    store = SqlMetricStore(database)
    collector = MetricCollector(store, clock=clock, max_points=max_points)
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
        metrics = Metrics(store, runs, clock=clock, max_points=max_points)
        yield OpenMetrics(metrics, [collector.run_forever, *(follower.run for follower in followers)])
    finally:
        await collector.close()
        store.close()
