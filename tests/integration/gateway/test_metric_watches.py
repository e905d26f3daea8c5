"""Tests of `WatchMetrics` over loopback: two gateways on one database, the ends of watches, and the tenant's limit."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import grpc
import pytest
from sqlalchemy import delete

from fixtures.gateway_entries import RUN
from fixtures.gateway_upstream import Upstream, adapter_event, wait_until
from fixtures.recorded_metrics import metric
from fixtures.running_gateway import (
    ADMIN,
    Failure,
    RunningGateway,
    bearer,
    failure_of,
    running_gateway,
    started_gateway,
)
from twinkle.api.gateway.v1 import (
    catalogue_service_pb2,
    catalogue_service_pb2_grpc,
    key_service_pb2,
    key_service_pb2_grpc,
    metric_service_pb2_grpc,
    quota_service_pb2,
    quota_service_pb2_grpc,
)
from twinkle.api.gateway.v1 import metric_service_pb2 as messages
from twinkle_services.gateway.catalogue.sql import RunRow, SqlRunStore
from twinkle_services.gateway.store.database import Database

SHORT = timedelta(milliseconds=100)


async def log(gateway: RunningGateway, run_id: str = 'ad-1', *, metadata: Any = ADMIN, **steps: int) -> None:
    """Store a point with the value of its step for each metric."""
    points = [messages.MetricPoint(name=name, step=step, value=step) for name, step in steps.items()]
    stub: Any = metric_service_pb2_grpc.MetricServiceStub(gateway.channel)
    await stub.LogMetrics(messages.LogMetricsRequest(run_id=run_id, points=points), metadata=metadata)


def watch(channel: grpc.aio.Channel, *runs: tuple[str, str], metadata: Any = ADMIN, **wanted: Any) -> Any:
    """Watch runs, by default 'ad-1'; each run has an id and a resume token."""
    watched = [messages.WatchedRun(run_id=run_id, resume_token=token) for run_id, token in runs or [('ad-1', '')]]
    stub: Any = metric_service_pb2_grpc.MetricServiceStub(channel)
    return stub.WatchMetrics(messages.WatchMetricsRequest(runs=watched, **wanted), metadata=metadata)


async def end_of(updates: Any) -> Failure:
    """Read a watch until it fails, and return the failure."""
    try:
        while await updates.read() is not grpc.aio.EOF:
            pass
    except grpc.aio.AioRpcError as error:
        return Failure.of(error)
    raise AssertionError('the watch ended without a failure')


def steps_of(response: messages.WatchMetricsResponse) -> dict[str, list[int]]:
    """Return the steps of a message by name."""
    return {series.name: list(series.steps) for series in response.series}


def reported(number: int, step: int, **values: float) -> Any:
    """Return the event of a model service that reports metrics of a step."""
    event = adapter_event('ad-1', step_count=step)
    event.metrics.reports.add(sequence_number=number, step=step).values.update(values)
    return event


@asynccontextmanager
async def two_gateways(
    upstream: Upstream, url: str, folder: Path
) -> AsyncIterator[tuple[RunningGateway, RunningGateway]]:
    """Run two gateways on one database."""
    options: dict[str, Any] = {
        'database_url': url,
        'futures': {'payload_dir': folder / 'payloads'},
        'key_pepper': '0123456789abcdef' * 2,
    }
    async with (
        running_gateway(folder / 'a', upstream=upstream.address, **options) as first,
        running_gateway(folder / 'b', upstream=upstream.address, **options) as second,
    ):
        yield first, second


async def test_points_that_another_gateway_stores_are_sent(postgres_database: str, tmp_path: Path) -> None:
    """Points that one gateway stores arrive at the other, and a watch continues at any gateway without repetition."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    async with upstream.serving(), two_gateways(upstream, postgres_database, tmp_path) as (here, there):
        there.clock.advance(timedelta(hours=1))
        await log(here, loss=1)
        updates = watch(there.channel)
        first = await updates.read()
        assert (first.run_id, first.is_snapshot, steps_of(first)) == ('ad-1', True, {'loss': [1]})
        await log(there, loss=2)
        assert steps_of(await updates.read()) == {'loss': [2]}
        # The clock of this gateway is an hour slow.
        await log(here, loss=3)
        last = await updates.read()
        assert (last.is_snapshot, steps_of(last)) == (False, {'loss': [3]})
        updates.cancel()
        upstream.adapters.watch.changes.put_nowait(reported(4, 4, **{'train/loss': 0.5}))
        resumed = watch(here.channel, ('ad-1', last.resume_token))
        found = await resumed.read()
        while not found.series:
            found = await resumed.read()
        assert (found.is_snapshot, steps_of(found)) == (False, {'train/loss': [4]})
        resumed.cancel()


async def test_several_runs_share_a_stream(gateway: RunningGateway, upstream: Upstream) -> None:
    """A watch of two runs has a message about each, and selects metrics and steps."""
    for run_id in ('ad-1', 'ad-2'):
        upstream.adapters.watch.changes.put_nowait(adapter_event(run_id))
        await log(gateway, run_id, loss=1, rate=1)
    updates = watch(gateway.channel, ('ad-1', ''), ('ad-2', ''), names=['loss'], begin_step=1)
    found = [await updates.read(), await updates.read()]
    assert [(message.run_id, steps_of(message)) for message in found] == [
        ('ad-1', {'loss': [1]}),
        ('ad-2', {'loss': [1]}),
    ]
    await log(gateway, 'ad-2', loss=0, rate=2)
    await log(gateway, 'ad-2', loss=2)
    last = await updates.read()
    assert (last.run_id, steps_of(last)) == ('ad-2', {'loss': [2]})
    updates.cancel()


async def test_watch_ends_when_its_key_is_revoked(tmp_path: Path) -> None:
    """A watch with a revoked key ends like a call with an unknown key, although points are still stored."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1', tenant_id='alice')]
    async with (
        upstream.serving(),
        running_gateway(tmp_path, upstream=upstream.address, key_memory=SHORT) as gateway,
    ):
        key = await gateway.make_key('alice')
        updates = watch(gateway.channel, metadata=bearer(key.secret))
        assert (await updates.read()).is_snapshot
        keys: Any = key_service_pb2_grpc.KeyServiceStub(gateway.channel)
        await keys.RevokeKey(key_service_pb2.RevokeKeyRequest(key_id=key.key.key_id), metadata=ADMIN)
        gateway.clock.advance(SHORT)
        failure = await end_of(updates)
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAUTHENTICATED, 'CREDENTIALS_INVALID')


async def test_watch_ends_when_the_run_is_removed(gateway: RunningGateway, upstream: Upstream, tmp_path: Path) -> None:
    """A watch fails with NOT_FOUND once its run is no longer listed; another tenant's watch fails immediately."""
    upstream.adapters.watch.changes.put_nowait(adapter_event('ad-1'))
    await log(gateway, loss=1)
    other = bearer((await gateway.make_key('bob')).secret)
    failure = await failure_of(watch(gateway.channel, metadata=other))
    assert (failure.code, failure.reason) == (grpc.StatusCode.NOT_FOUND, 'RUN_NOT_FOUND')
    updates = watch(gateway.channel)
    await updates.read()
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    async with database.write() as connection:
        await connection.execute(delete(RunRow))
    await database.close()
    failure = await end_of(updates)
    assert (failure.code, failure.reason, failure.metadata) == (
        grpc.StatusCode.NOT_FOUND,
        'RUN_NOT_FOUND',
        {'runId': 'ad-1'},
    )


async def test_stopping_gateway_ends_watches_with_a_status_that_clients_retry(tmp_path: Path) -> None:
    """A gateway that begins to stop ends watches immediately with UNAVAILABLE and a retry time."""
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    await SqlRunStore(database).save(replace(RUN, tenant_id='default'))
    await database.close()
    async with (
        started_gateway(tmp_path) as gateway,
        grpc.aio.insecure_channel(gateway.server.address) as channel,
    ):
        updates = watch(channel)
        assert (await updates.read()).is_snapshot
        stopping = asyncio.ensure_future(gateway.server.stop(timedelta(seconds=60)))
        failure = await end_of(updates)
        await stopping
        assert (failure.code, failure.reason) == (grpc.StatusCode.UNAVAILABLE, 'DRAINING')
        assert failure.retry_seconds == 1


@pytest.mark.parametrize(
    ('runs', 'wanted', 'field'),
    [
        ([('', '')], {}, 'runs[0].run_id'),
        ([('ad-1', ''), ('ad-1', '')], {}, 'runs[1].run_id'),
        ([(f'ad-{number}', '') for number in range(21)], {}, 'runs'),
        ([('ad-1', 'ad-2.5')], {}, 'runs[0].resume_token'),
        ([('ad-1', 'ad-1.-5')], {}, 'runs[0].resume_token'),
        ([('ad-1', 'ad-1.' + '9' * 19)], {}, 'runs[0].resume_token'),
        ([('ad-1', '5')], {}, 'runs[0].resume_token'),
        ([('ad-1', '')], {'names': [' ']}, 'names[0]'),
        ([('ad-1', '')], {'begin_step': -1}, 'begin_step'),
        ([('ad-1', '')], {'max_points': 1}, 'max_points'),
    ],
)
async def test_invalid_watches_are_refused(gateway: RunningGateway, runs: Any, wanted: Any, field: str) -> None:
    """An invalid request is refused before a run is looked up, and the error names the field."""
    failure = await failure_of(watch(gateway.channel, *runs, **wanted))
    assert (failure.code, failure.metadata['field']) == (grpc.StatusCode.INVALID_ARGUMENT, field)


async def test_tenant_over_its_limit_of_points_still_trains(tmp_path: Path) -> None:
    """Logged points over the quota are refused, reported points are dropped, and usage contains the stored number."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1'), adapter_event('ad-2')]
    async with (
        upstream.serving(),
        running_gateway(tmp_path, upstream=upstream.address, quotas={'metric_points': 3}) as gateway,
    ):
        await log(gateway, loss=1, rate=1)
        await log(gateway, 'ad-2', loss=1)
        for run_id in ('ad-1', 'ad-2'):
            failure = await failure_of(log(gateway, run_id, loss=1, other=1))
            assert (failure.code, failure.reason) == (grpc.StatusCode.RESOURCE_EXHAUSTED, 'QUOTA_EXCEEDED')
            assert (failure.metadata['quota'], failure.metadata['limit']) == ('metric_points', '3')
        before = metric('twinkle_metric_reports_dropped_total', cause='metric_points')
        upstream.adapters.watch.changes.put_nowait(reported(2, 5, **{'train/loss': 2.0}))
        catalogue: Any = catalogue_service_pb2_grpc.CatalogueServiceStub(gateway.channel)
        run = catalogue_service_pb2.GetRunRequest(run_id='ad-1')
        await wait_until(lambda: catalogue.GetRun(run, metadata=ADMIN), lambda found: found.run.step_count == 5)

        async def dropped() -> float:
            # The call lets the other tasks of the gateway run.
            await catalogue.GetRun(run, metadata=ADMIN)
            return metric('twinkle_metric_reports_dropped_total', cause='metric_points')

        await wait_until(dropped, lambda count: count == before + 1)
        usages = (await catalogue.GetUsage(catalogue_service_pb2.GetUsageRequest(), metadata=ADMIN)).usages
        assert {usage.run_id: usage.metric_point_count for usage in usages} == {'ad-1': 2, 'ad-2': 1}
        quotas: Any = quota_service_pb2_grpc.QuotaServiceStub(gateway.channel)
        larger = quota_service_pb2.Quota(metric_points=4)
        await quotas.SetQuota(quota_service_pb2.SetQuotaRequest(tenant_id='default', quota=larger), metadata=ADMIN)
        await log(gateway, loss=2)
