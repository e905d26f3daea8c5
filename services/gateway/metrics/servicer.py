"""Serves `MetricService`."""

# ruff: noqa: N802 (the methods have the contract's names)

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.gateway.v1 import metric_service_pb2 as messages
from twinkle.api.gateway.v1 import metric_service_pb2_grpc
from twinkle_services.gateway.metrics.convert import (
    metric_filter_from_proto,
    points_from_proto,
    series_to_proto,
    update_to_proto,
    watched_runs_from_proto,
)
from twinkle_services.gateway.metrics.metrics import Metrics
from twinkle_services.gateway.metrics.watches import MetricWatches
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import id_from_proto


class MetricServicer(metric_service_pb2_grpc.MetricServiceServicer):
    """Implements `MetricService`."""

    def __init__(self, metrics: Metrics, watches: MetricWatches) -> None:
        self._metrics = metrics
        self._watches = watches

    async def LogMetrics(self, request: messages.LogMetricsRequest, context: Context) -> messages.LogMetricsResponse:
        run_id, points = id_from_proto(request.run_id, 'run_id'), points_from_proto(request)
        await self._metrics.log(current_caller(), run_id, points)
        return messages.LogMetricsResponse()

    async def GetMetrics(self, request: messages.GetMetricsRequest, context: Context) -> messages.GetMetricsResponse:
        run_id, wanted = id_from_proto(request.run_id, 'run_id'), metric_filter_from_proto(request)
        series = await self._metrics.get(current_caller(), run_id, wanted)
        return await asyncio.to_thread(lambda: messages.GetMetricsResponse(series=map(series_to_proto, series)))

    async def WatchMetrics(
        self, request: messages.WatchMetricsRequest, context: Context
    ) -> AsyncIterator[messages.WatchMetricsResponse]:
        runs, wanted = watched_runs_from_proto(request), metric_filter_from_proto(request)
        async with aclosing(self._watches.watch(current_caller(), runs, wanted)) as updates:
            while True:
                # No variable refers to the points while a slow client reads them.
                yield await asyncio.to_thread(update_to_proto, await anext(updates))
