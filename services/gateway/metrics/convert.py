"""Converts the messages of `MetricService` and reports of model services; checks names and steps for rollouts too."""

from twinkle.api.gateway.v1 import metric_service_pb2 as messages
from twinkle.api.model.v1 import adapter_service_pb2
from twinkle_services.gateway.metrics.rules import (
    DEFAULT_POINTS,
    MAX_LISTED_NAMES,
    MAX_LOGGED,
    MAX_NAME_LENGTH,
    MAX_POINTS,
    MAX_STEP,
    MAX_WATCHED,
    MetricFilter,
    MetricUpdate,
    Point,
    Report,
    RunReports,
    Series,
    is_metric_name,
)
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.rpc.fields import id_from_proto, not_negative


def points_from_proto(request: messages.LogMetricsRequest) -> list[Point]:
    """Return the points of a request.

    Raises:
        InvalidField: there are no points or too many, a name or a step is invalid, or a step or a value is not set.
    """
    if not 0 < len(request.points) <= MAX_LOGGED:
        raise InvalidField('points', f'must have 1 to {MAX_LOGGED} items, got {len(request.points)}')
    return [_point(point, f'points[{index}]') for index, point in enumerate(request.points)]


def metric_filter_from_proto(request: messages.GetMetricsRequest | messages.WatchMetricsRequest) -> MetricFilter:
    """Return the filter for points.

    Raises:
        InvalidField: a name, a step or the number of points is invalid, or there are too many names.
    """
    if len(request.names) > MAX_LISTED_NAMES:
        raise InvalidField('names', f'must have at most {MAX_LISTED_NAMES} items, got {len(request.names)}')
    max_points = not_negative(request.max_points, 'max_points') or DEFAULT_POINTS
    if max_points == 1:
        raise InvalidField('max_points', 'must be at least 2, or 0 for the default')
    end_step = None
    if isinstance(request, messages.GetMetricsRequest) and request.HasField('end_step'):
        end_step = not_negative(request.end_step, 'end_step')
    return MetricFilter(
        names=[metric_name_from_proto(name, f'names[{index}]') for index, name in enumerate(request.names)],
        begin_step=not_negative(request.begin_step, 'begin_step'),
        end_step=end_step,
        max_points=min(max_points, MAX_POINTS),
    )


def watched_runs_from_proto(request: messages.WatchMetricsRequest) -> dict[str, int | None]:
    """Return the runs of a watch, each with the revision of its resume token, or None without a token.

    Raises:
        InvalidField: there are no runs or too many, a run occurs twice, or an id or a token is invalid.
    """
    if not 0 < len(request.runs) <= MAX_WATCHED:
        raise InvalidField('runs', f'must have 1 to {MAX_WATCHED} items, got {len(request.runs)}')
    found: dict[str, int | None] = {}
    for index, run in enumerate(request.runs):
        run_id = id_from_proto(run.run_id, f'runs[{index}].run_id')
        if run_id in found:
            raise InvalidField(f'runs[{index}].run_id', f'{run_id!r} occurs twice; list each run once')
        found[run_id] = _revision_from_proto(run, f'runs[{index}].resume_token')
    return found


def _revision_from_proto(run: messages.WatchedRun, field: str) -> int | None:
    if not run.resume_token:
        return None
    run_id, _, number = run.resume_token.rpartition('.')
    if run_id != run.run_id or not number.isascii() or not number.isdigit() or len(number) > 18:
        raise InvalidField(field, 'is not from a message about this run; use the token of its last message, or none')
    return int(number)


def update_to_proto(update: MetricUpdate) -> messages.WatchMetricsResponse:
    """Convert points of a run for a watcher."""
    return messages.WatchMetricsResponse(
        run_id=update.run_id,
        series=map(series_to_proto, update.series),
        is_snapshot=update.is_snapshot,
        resume_token=f'{update.run_id}.{update.revision}',
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


def metric_name_from_proto(name: str, field: str) -> str:
    """Return the name of a metric, of a part of a reward, or of a group of rollouts.

    Raises:
        InvalidField: the name is invalid.
    """
    if not is_metric_name(name):
        rule = f'must be 1 to {MAX_NAME_LENGTH} printable ASCII characters without spaces'
        raise InvalidField(field, f'{rule}, got {name[:MAX_NAME_LENGTH]!r}')
    return name


def run_step_from_proto(step: int, field: str) -> int:
    """Return the step of a run.

    Raises:
        InvalidField: the step is out of range.
    """
    if not 0 <= step <= MAX_STEP:
        raise InvalidField(field, f'must be at least 0 and below 2^53, got {step}')
    return step


def _point(point: messages.MetricPoint, field: str) -> Point:
    for name in ('step', 'value'):
        if not point.HasField(name):
            raise InvalidField(f'{field}.{name}', 'must be set')
    name = metric_name_from_proto(point.name, f'{field}.name')
    return Point(name, run_step_from_proto(point.step, f'{field}.step'), point.value)


def reports_of(message: adapter_service_pb2.WatchAdaptersResponse) -> RunReports:
    """Return the reports of the run in a model service's response that contains an adapter."""
    reports = [_report_of(report) for report in message.metrics.reports]
    return RunReports(tenant_id=message.tenant_id, run_id=message.adapter.adapter_id, reports=reports)


def _report_of(message: adapter_service_pb2.MetricReport) -> Report:
    # Names of metrics that a loss or a metric of a plugin chose may be invalid.
    values = {name: value for name, value in message.values.items() if is_metric_name(name)}
    step = min(max(message.step, 0), MAX_STEP)
    points = [Point(name, step, value) for name, value in sorted(values.items())]
    return Report(sequence_number=message.sequence_number, points=points)
