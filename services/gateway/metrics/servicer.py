"""Serves `MetricService`, and converts the messages of its contract."""

# ruff: noqa: N802 (the methods have the contract's names)

import asyncio
from typing import Any

import grpc

from services.gateway.metrics.metrics import Metrics
from services.gateway.metrics.rules import (
    DEFAULT_POINTS,
    MAX_LISTED_NAMES,
    MAX_LOGGED,
    MAX_NAME_LENGTH,
    MAX_POINTS,
    MAX_STEP,
    MetricFilter,
    Point,
    Series,
    is_metric_name,
)
from services.kit.errors import InvalidField
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import id_from_proto, not_negative
from twinkle.api.gateway.v1 import metric_service_pb2 as messages
from twinkle.api.gateway.v1 import metric_service_pb2_grpc

Context = grpc.aio.ServicerContext[Any, Any]


class MetricServicer(metric_service_pb2_grpc.MetricServiceServicer):
    """Implements `MetricService`."""

    def __init__(self, metrics: Metrics) -> None:
        self._metrics = metrics

    async def LogMetrics(self, request: messages.LogMetricsRequest, context: Context) -> messages.LogMetricsResponse:
        run_id, points = id_from_proto(request.run_id, 'run_id'), points_from_proto(request)
        await self._metrics.log(current_caller(), run_id, points)
        return messages.LogMetricsResponse()

    async def GetMetrics(self, request: messages.GetMetricsRequest, context: Context) -> messages.GetMetricsResponse:
        run_id, wanted = id_from_proto(request.run_id, 'run_id'), metric_filter_from_proto(request)
        series = await self._metrics.get(current_caller(), run_id, wanted)
        return await asyncio.to_thread(lambda: messages.GetMetricsResponse(series=map(series_to_proto, series)))


def points_from_proto(request: messages.LogMetricsRequest) -> list[Point]:
    """Return the points of a request.

    Raises:
        InvalidField: there are no points or too many, a name or a step is invalid, or a step or a value is not set.
    """
    if not 0 < len(request.points) <= MAX_LOGGED:
        raise InvalidField('points', f'must have 1 to {MAX_LOGGED} items, got {len(request.points)}')
    return [_point(point, f'points[{index}]') for index, point in enumerate(request.points)]


def metric_filter_from_proto(request: messages.GetMetricsRequest) -> MetricFilter:
    """Return the filter for points.

    Raises:
        InvalidField: a name, a step or the number of points is invalid, or there are too many names.
    """
    if len(request.names) > MAX_LISTED_NAMES:
        raise InvalidField('names', f'must have at most {MAX_LISTED_NAMES} items, got {len(request.names)}')
    max_points = not_negative(request.max_points, 'max_points') or DEFAULT_POINTS
    if max_points == 1:
        raise InvalidField('max_points', 'must be at least 2, or 0 for the default')
    end_step = not_negative(request.end_step, 'end_step') if request.HasField('end_step') else None
    return MetricFilter(
        names=[_name(name, f'names[{index}]') for index, name in enumerate(request.names)],
        begin_step=not_negative(request.begin_step, 'begin_step'),
        end_step=end_step,
        max_points=min(max_points, MAX_POINTS),
    )


def series_to_proto(series: Series) -> messages.MetricSeries:
    """Convert the points of a metric."""
    return messages.MetricSeries(
        name=series.name,
        steps=series.steps,
        values=series.values,
        times_us=series.times_us,
        point_count=series.point_count,
    )


def _point(point: messages.MetricPoint, field: str) -> Point:
    for name in ('step', 'value'):
        if not point.HasField(name):
            raise InvalidField(f'{field}.{name}', 'must be set')
    return Point(_name(point.name, f'{field}.name'), _step(point.step, f'{field}.step'), point.value)


def _step(step: int, field: str) -> int:
    if not 0 <= step <= MAX_STEP:
        raise InvalidField(field, f'must be at least 0 and below 2^53, got {step}')
    return step


def _name(name: str, field: str) -> str:
    if not is_metric_name(name):
        rule = f'must be 1 to {MAX_NAME_LENGTH} printable ASCII characters without spaces'
        raise InvalidField(field, f'{rule}, got {name[:MAX_NAME_LENGTH]!r}')
    return name
