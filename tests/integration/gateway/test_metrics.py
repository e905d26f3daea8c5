"""Tests of `MetricService` over loopback, with the runs that a model service reports."""

import math
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.gateway_upstream import Upstream, adapter_event, wait_until
from fixtures.running_gateway import ADMIN, RunningGateway, bearer, failure_of, running_gateway
from twinkle.api.gateway.v1 import catalogue_service_pb2, catalogue_service_pb2_grpc, metric_service_pb2_grpc
from twinkle.api.gateway.v1 import metric_service_pb2 as messages
from twinkle.api.gateway.v1.key_service_pb2 import SCOPE_SAMPLE


def stub_of(gateway: RunningGateway) -> Any:
    return metric_service_pb2_grpc.MetricServiceStub(gateway.channel)


def log_request(run_id: str = 'ad-1', **values: float) -> messages.LogMetricsRequest:
    """Return a request that logs values at step 3."""
    points = [messages.MetricPoint(name=name, step=3, value=value) for name, value in values.items()]
    return messages.LogMetricsRequest(run_id=run_id, points=points)


async def values_of(gateway: RunningGateway, **filters: Any) -> dict[str, tuple[list[int], list[float]]]:
    """Return steps and values of the metrics of a run by name."""
    request = messages.GetMetricsRequest(**{'run_id': 'ad-1', **filters})
    response = await stub_of(gateway).GetMetrics(request, metadata=ADMIN)
    return {series.name: (list(series.steps), list(series.values)) for series in response.series}


async def test_logged_values_are_returned_after_a_restart(tmp_path: Path) -> None:
    """Values are stored by run, name and step with the gateway's time, and survive a restart of the gateway."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    async with upstream.serving():
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            await stub_of(gateway).LogMetrics(log_request(loss=2.5, reward=math.inf), metadata=ADMIN)
            await stub_of(gateway).LogMetrics(log_request(loss=1.5), metadata=ADMIN)
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            assert await values_of(gateway) == {'loss': ([3], [1.5]), 'reward': ([3], [math.inf])}
            assert await values_of(gateway, names=['loss'], end_step=3) == {}
            response = await stub_of(gateway).GetMetrics(messages.GetMetricsRequest(run_id='ad-1'), metadata=ADMIN)
            # The second call replaced a value in the same microsecond of the fake clock.
            times = {series.name: series.times_us[0] for series in response.series}
            assert times['reward'] == int(gateway.clock.now().timestamp() * 1_000_000)
            assert times['loss'] == times['reward'] + 1


def reported(number: int, step: int, **values: float) -> Any:
    """Return the event of a model service that reports metrics of a step."""
    event = adapter_event('ad-1', step_count=step)
    event.metrics.reports.add(sequence_number=number, step=step).values.update(values)
    return event


async def test_reports_of_the_model_service_are_stored(tmp_path: Path) -> None:
    """Reports of a snapshot and of changes are stored by step, once across restarts; the program makes no call."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [reported(2, 1, loss=3.0, **{'bad name': 1.0})]
    async with upstream.serving():
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
            listing = catalogue_service_pb2.ListRunsRequest()
            await wait_until(lambda: catalogue.ListRuns(listing, metadata=ADMIN), lambda response: bool(response.runs))
            upstream.adapters.watch.changes.put_nowait(reported(4, 2, loss=2.0))
            await wait_until(lambda: values_of(gateway), lambda found: found.get('loss') == ([1, 2], [3.0, 2.0]))
            await stub_of(gateway).LogMetrics(log_request(loss=9.0), metadata=ADMIN)
        async with running_gateway(tmp_path, upstream=upstream.address) as gateway:
            assert await values_of(gateway) == {'loss': ([1, 2, 3], [3.0, 2.0, 9.0])}


async def test_run_of_another_tenant_does_not_exist(gateway: RunningGateway, upstream: Upstream) -> None:
    """The metrics of another tenant's run cannot be logged or read, although the run has metrics."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    await stub_of(gateway).LogMetrics(log_request(loss=1.0), metadata=ADMIN)
    other = bearer((await gateway.make_key('bob')).secret)
    for call in (
        stub_of(gateway).LogMetrics(log_request(loss=9.0), metadata=other),
        stub_of(gateway).GetMetrics(messages.GetMetricsRequest(run_id='ad-1'), metadata=other),
    ):
        failure = await failure_of(call)
        assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'RUN_NOT_FOUND')
    assert await values_of(gateway) == {'loss': ([3], [1.0])}


async def test_key_for_sampling_reads_and_does_not_log(gateway: RunningGateway, upstream: Upstream) -> None:
    """Logging needs the scope for training; every key of the tenant reads metrics."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1', tenant_id='alice'))
    key = bearer((await gateway.make_key('alice', scopes=(SCOPE_SAMPLE,))).secret)
    failure = await failure_of(stub_of(gateway).LogMetrics(log_request(loss=1.0), metadata=key))
    assert failure.code is grpc.StatusCode.PERMISSION_DENIED
    catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
    listing = catalogue_service_pb2.ListRunsRequest()
    await wait_until(lambda: catalogue.ListRuns(listing, metadata=key), lambda response: bool(response.runs))
    response = await stub_of(gateway).GetMetrics(messages.GetMetricsRequest(run_id='ad-1'), metadata=key)
    assert not response.series


@pytest.mark.parametrize(
    ('points', 'field'),
    [
        ([], 'points'),
        ([{'name': 'x', 'step': 0, 'value': 0.0}] * 1001, 'points'),
        ([{'name': 'x', 'step': 0, 'value': 0.0}, {'name': '', 'step': 0, 'value': 0.0}], 'points[1].name'),
        ([{'name': 'a b', 'step': 0, 'value': 0.0}], 'points[0].name'),
        ([{'name': 'x', 'value': 0.0}], 'points[0].step'),
        ([{'name': 'x', 'step': 0}], 'points[0].value'),
        ([{'name': 'ü', 'step': 0, 'value': 0.0}], 'points[0].name'),
        ([{'name': 'x' * 129, 'step': 0, 'value': 0.0}], 'points[0].name'),
        ([{'name': 'x', 'step': -1, 'value': 0.0}], 'points[0].step'),
        ([{'name': 'x', 'step': 2**53, 'value': 0.0}], 'points[0].step'),
    ],
)
async def test_invalid_points_are_refused(gateway: RunningGateway, points: list[dict[str, Any]], field: str) -> None:
    """An invalid request is refused before the run is looked up; the error names the field, and nothing is stored."""
    request = messages.LogMetricsRequest(run_id='ad-1', points=[messages.MetricPoint(**point) for point in points])
    failure = await failure_of(stub_of(gateway).LogMetrics(request, metadata=ADMIN))
    assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


@pytest.mark.parametrize(
    ('filters', 'field'),
    [
        ({'names': ['x'] * 101}, 'names'),
        ({'names': ['x', ' ']}, 'names[1]'),
        ({'begin_step': -1}, 'begin_step'),
        ({'end_step': -1}, 'end_step'),
        ({'max_points': -1}, 'max_points'),
        ({'max_points': 1}, 'max_points'),
    ],
)
async def test_invalid_filters_are_refused(gateway: RunningGateway, filters: dict[str, Any], field: str) -> None:
    """The error for an invalid filter names the field."""
    request = messages.GetMetricsRequest(run_id='ad-1', **filters)
    failure = await failure_of(stub_of(gateway).GetMetrics(request, metadata=ADMIN))
    assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_points_of_a_run_are_limited(tmp_path: Path) -> None:
    """A request beyond the limit is refused as a whole; replaced values do not count twice, even after a restart."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1'), adapter_event('ad-2')]
    async with upstream.serving():
        async with running_gateway(tmp_path, upstream=upstream.address, metric_points_per_run=3) as gateway:
            stub = stub_of(gateway)
            for _ in range(5):
                await stub.LogMetrics(log_request(a=1.0, b=2.0), metadata=ADMIN)
            failure = await failure_of(stub.LogMetrics(log_request(c=3.0, d=4.0), metadata=ADMIN))
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
            await stub.LogMetrics(log_request('ad-2', c=3.0, d=4.0), metadata=ADMIN)
            assert set(await values_of(gateway)) == {'a', 'b'}
        async with running_gateway(tmp_path, upstream=upstream.address, metric_points_per_run=3) as gateway:
            await stub_of(gateway).LogMetrics(log_request(c=3.0), metadata=ADMIN)
            failure = await failure_of(stub_of(gateway).LogMetrics(log_request(d=4.0), metadata=ADMIN))
            assert failure.reason == 'QUOTA_EXCEEDED'
            assert set(await values_of(gateway)) == {'a', 'b', 'c'}
