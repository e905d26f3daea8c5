"""Metrics of a run: numbers by name and step, which the server stores for as long as the run is listed."""

import operator
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, SupportsIndex

from twinkle.api.gateway.v1 import metric_service_pb2 as pb
from twinkle.api.gateway.v1.metric_service_pb2_grpc import MetricServiceStub
from twinkle.tracking import number_of
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method, remote_stream

_EPOCH = datetime.fromtimestamp(0, UTC)
_POINTS_PER_REQUEST = 1000
_MAX_STEP, _MAX_POINTS = 2**53 - 1, 10_000
"""Largest step that the server accepts, and largest number of points that it returns."""


@dataclass(frozen=True, kw_only=True)
class MetricSeries:
    """Points of one metric, by ascending step."""

    steps: Sequence[int]
    values: Sequence[float]
    times: Sequence[datetime]
    """UTC: time at which the server stored each point."""
    point_count: int
    """Number of stored points between the requested steps; larger than the number of points if they were reduced."""


@dataclass(frozen=True, kw_only=True)
class MetricUpdate:
    """Points of a run that the server sends to a watcher."""

    series: Mapping[str, MetricSeries]
    """New and replaced points by name of the metric."""
    is_snapshot: bool
    """Whether the update contains all selected points, which then replace all points received before."""

    def applied_to(self, curves: Mapping[str, MetricSeries]) -> dict[str, MetricSeries]:
        """Return all points after this update.

        Args:
            curves: Points after the previous update; empty before the first update.
        """
        if self.is_snapshot:
            return dict(self.series)
        return {**curves, **{name: _merged(curves.get(name), series) for name, series in self.series.items()}}


class RunMetrics:
    """Logs and reads the metrics of a run.

    Args:
        run_id: Id of the run, which is the adapter's id.
        client: Connection to the server. Defaults to the client initialized last.
    """

    def __init__(self, run_id: str, *, client: TwinkleClient | None = None) -> None:
        self.run_id = run_id
        self._connection = current_client(client).connection
        self._stub = MetricServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def log(self, values: Mapping[str, Any], *, step: int) -> None:
        """Store values at a step; a value for the same name and step replaces the earlier value.

        More than 1,000 values are sent in several requests, so after an error, the first values may be stored.

        Args:
            values: Numbers by name; NumPy and torch scalars are accepted. A name has 1 to 128 printable ASCII
                characters and no spaces.
            step: Step of the program, at least 0.

        Raises:
            TypeError: A name is not a string, a value is not a number, or the step is not an integer.
            UsageError: A name or the step is invalid.
            NotFoundError: The run does not exist.
            QuotaError: The run would have too many points or names.
        """
        points = [_point(name, step_to_proto(step), value) for name, value in values.items()]
        for begin in range(0, len(points), _POINTS_PER_REQUEST):
            part = points[begin : begin + _POINTS_PER_REQUEST]
            await self._connection.unary(self._stub.LogMetrics, pb.LogMetricsRequest(run_id=self.run_id, points=part))

    @remote_method
    async def get(
        self, names: Sequence[str] = (), *, begin_step: int = 0, end_step: int | None = None, max_points: int = 1000
    ) -> dict[str, MetricSeries]:
        """Return metrics by name.

        Args:
            names: Metrics to return, at most 100. Empty: all.
            begin_step: First step.
            end_step: Step before which the metrics end. Unset: no limit.
            max_points: Maximum number of points of each metric, from 2 to 10,000, and at most 100,000 of all metrics
                together. A metric with more points is reduced to its first and last point, and the smallest and the
                largest value of ranges of steps, so that peaks remain.

        Raises:
            TypeError: `names` is a single string, or a number is not an integer.
            UsageError: An argument is invalid.
            NotFoundError: The run does not exist.
        """
        request = pb.GetMetricsRequest(
            run_id=self.run_id,
            names=_names(names),
            begin_step=step_to_proto(begin_step),
            end_step=None if end_step is None else step_to_proto(end_step),
            max_points=_max_points(max_points),
        )
        response = await self._connection.unary(self._stub.GetMetrics, request)
        return {series.name: _series(series) for series in response.series}

    @remote_stream
    async def watch(
        self, names: Sequence[str] = (), *, begin_step: int = 0, max_points: int = 1000
    ) -> AsyncIterator[MetricUpdate]:
        """Yield the stored points, and then new and replaced points as they are stored, usually within a second.

        The stream continues until the caller closes it, even after the run has ended. After a lost connection, it
        resumes without a gap if the server is available again within the client's retry timeout.

        Args:
            names: Metrics to watch, at most 100. Empty: all, including metrics that are stored later.
            begin_step: First step.
            max_points: Maximum number of points of each metric in an update, see `get`. If more points are new, for
                example because the caller was busy, the update is a snapshot.

        Raises:
            TypeError: `names` is a single string, or a number is not an integer.
            UsageError: An argument is invalid.
            NotFoundError: The run does not exist, or is no longer listed.
        """
        request = pb.WatchMetricsRequest(
            runs=[pb.WatchedRun(run_id=self.run_id)],
            names=_names(names),
            begin_step=step_to_proto(begin_step),
            max_points=_max_points(max_points),
        )

        def resume_after(response: pb.WatchMetricsResponse) -> None:
            request.runs[0].resume_token = response.resume_token

        call = self._stub.WatchMetrics
        async with aclosing(self._connection.resumed_stream(call, request, resume_after=resume_after)) as responses:
            async for response in responses:
                if response.series or response.is_snapshot:
                    yield _update(response)


def step_to_proto(step: SupportsIndex) -> int:
    """Return the step, limited to -1 to 2^53 so that it fits into a message. The server refuses both limits.

    Raises:
        TypeError: The step is not an integer.
    """
    return max(min(operator.index(step), _MAX_STEP + 1), -1)


def _names(names: Sequence[str]) -> Sequence[str]:
    if isinstance(names, str):
        raise TypeError(f'names: expected a list of names, got {names!r}')
    return names


def _max_points(count: SupportsIndex) -> int:
    return max(min(operator.index(count), _MAX_POINTS), -1)


def _point(name: Any, step: int, value: Any) -> pb.MetricPoint:
    if not isinstance(name, str):
        raise TypeError(f'values: names must be strings, got {name!r}')
    return pb.MetricPoint(name=name, step=step, value=number_of(name, value))


def _series(message: pb.MetricSeries) -> MetricSeries:
    return MetricSeries(
        steps=list(message.steps),
        values=list(message.values),
        times=[_EPOCH + timedelta(microseconds=time) for time in message.times_us],
        point_count=message.point_count,
    )


def _update(message: pb.WatchMetricsResponse) -> MetricUpdate:
    series = {series.name: _series(series) for series in message.series}
    return MetricUpdate(series=series, is_snapshot=message.is_snapshot)


def _merged(known: MetricSeries | None, new: MetricSeries) -> MetricSeries:
    """Return the known and the new points of a metric. A new point replaces the known point of the same step."""
    if known is None:
        return new
    points = {step: (value, time) for step, value, time in zip(known.steps, known.values, known.times, strict=True)}
    added = len(new.steps) - len(points.keys() & set(new.steps))
    points.update({step: (value, time) for step, value, time in zip(new.steps, new.values, new.times, strict=True)})
    steps = sorted(points)
    return MetricSeries(
        steps=steps,
        values=[points[step][0] for step in steps],
        times=[points[step][1] for step in steps],
        point_count=known.point_count + added,
    )
