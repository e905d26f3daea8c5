"""Tests of `RunMetrics` and `twinkle run show` with a gateway."""

import asyncio
import json
import math
from collections.abc import AsyncIterator
from datetime import UTC, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fixtures.byte_proxy import ByteProxy
from fixtures.gateway_run import client_with_run, command_line, gateway_with_run
from fixtures.gateway_upstream import wait_until
from fixtures.running_gateway import ADMIN_KEY, RunningGateway
from twinkle.tracking import open_tracker
from twinkle_client import NotFoundError, QuotaError, TwinkleClient, UsageError
from twinkle_client.metrics import RunMetrics


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with the run 'ad-1'."""
    async with gateway_with_run(tmp_path, limits={'message_bytes': 4 << 20}) as running:
        yield running


@pytest.fixture
async def metrics(gateway: RunningGateway) -> AsyncIterator[RunMetrics]:
    """Metrics of the run 'ad-1'."""
    async with client_with_run(gateway) as client:
        yield RunMetrics('ad-1', client=client)


@pytest.fixture
def run(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command."""
    return command_line(monkeypatch, gateway.address)


async def test_numbers_of_every_kind_are_logged(metrics: RunMetrics) -> None:
    """Python, NumPy and torch numbers are stored as float64, including tensors with a gradient."""
    values = {'int': 3, 'float': -0.5, 'numpy': np.float32(1.5), 'nan': math.nan, 'inf': math.inf}
    await metrics.log.aio({**values, 'torch': torch.tensor(2.5, requires_grad=True)}, step=np.int64(0))
    found = await metrics.get.aio([*values, 'torch'])
    assert {name: repr(series.values[0]) for name, series in found.items()} == {
        'int': '3.0', 'float': '-0.5', 'numpy': '1.5', 'nan': 'nan', 'inf': 'inf', 'torch': '2.5',
    }  # fmt: skip
    assert found['int'].times[0].tzinfo is UTC


async def test_many_values_are_sent_in_several_requests(metrics: RunMetrics) -> None:
    """A run has at most 1,000 metrics; a call with more metrics is refused, and the first 1,000 are stored."""
    with pytest.raises(QuotaError, match='metric_names_per_run'):
        await metrics.log.aio({f'layer/{index:04}': index for index in range(1200)}, step=0)
    found = await metrics.get.aio()
    assert list(found) == [f'layer/{index:04}' for index in range(1000)]


async def test_long_curves_are_reduced_on_request(metrics: RunMetrics) -> None:
    """A curve with more points than requested is reduced, and reports its number of points."""
    for step in range(30):
        await metrics.log.aio({'loss': 1.0 / (step + 1)}, step=step)
    (series,) = (await metrics.get.aio(begin_step=10, end_step=30, max_points=4)).values()
    assert (series.steps, series.point_count) == ([10, 29], 20)
    assert series.values == [1 / 11, 1 / 30]


@pytest.mark.parametrize('value', ['1.5', b'1.5', None, [1.0], np.zeros(2), 10**400])
async def test_values_that_are_no_numbers_are_refused_by_name(metrics: RunMetrics, value: Any) -> None:
    """The error for a value that is not a single number names it, and nothing of the call is stored."""
    with pytest.raises(TypeError, match=r"values\['reward'\]: expected a number"):
        await metrics.log.aio({'loss': 1.0, 'reward': value}, step=0)
    assert await metrics.get.aio() == {}


async def test_errors_name_the_field_and_the_run(gateway: RunningGateway, metrics: RunMetrics) -> None:
    """Invalid names and steps raise UsageError; unknown runs raise NotFoundError."""
    with pytest.raises(UsageError, match=r'points\[0\]\.name'):
        await metrics.log.aio({'my loss': 1.0}, step=0)
    for step in (-1, -(10**30), 2**53, 10**30):
        with pytest.raises(UsageError, match='step'):
            await metrics.log.aio({'loss': 1.0}, step=step)
    for step in (None, 1.0, '1'):
        with pytest.raises(TypeError):
            await metrics.log.aio({'loss': 1.0}, step=step)
    with pytest.raises(TypeError, match='names must be strings'):
        await metrics.log.aio({1: 1.0}, step=0)
    client = TwinkleClient(gateway.address, ADMIN_KEY)
    with pytest.raises(NotFoundError, match='ad-9'):
        await RunMetrics('ad-9', client=client).log.aio({'loss': 1.0}, step=0)
    await asyncio.to_thread(client.close)


async def test_tracker_survives_a_run_that_the_server_refuses(
    gateway: RunningGateway, metrics: RunMetrics, caplog: pytest.LogCaptureFixture
) -> None:
    """If the server refuses a tracker's values, the tracker warns once, counts them, and does not stop the program."""
    client = TwinkleClient(gateway.address, ADMIN_KEY)
    tracker = open_tracker(metrics=RunMetrics('ad-9', client=client))
    for step in range(3):
        tracker.log({'loss': 1.0}, step=step)
    await asyncio.to_thread(tracker.finish)
    await asyncio.to_thread(client.close)
    assert tracker.lost_counts == {'service': 3}
    assert 'tracker service lost the values of step 0, training continues: NotFoundError' in caplog.text
    assert await metrics.get.aio() == {}


async def test_tracker_stores_values_of_an_outage_when_the_server_is_back(
    gateway: RunningGateway, metrics: RunMetrics
) -> None:
    """Log calls return immediately while the server is unreachable; their values are stored later."""
    proxy = ByteProxy(int(gateway.address.rpartition(':')[2]), is_counting_responses=False)
    address = await proxy.start()
    client = TwinkleClient(address, ADMIN_KEY)
    tracker = open_tracker(metrics=RunMetrics('ad-1', client=client))
    tracker.log({'loss': 0.0}, step=0)
    await wait_until(metrics.get.aio, bool)
    await proxy.stop()
    for step in range(1, 6):
        tracker.log({'loss': float(step)}, step=step)
    await proxy.start(int(address.rpartition(':')[2]))
    await asyncio.to_thread(tracker.finish)
    await asyncio.to_thread(client.close)
    await proxy.stop()
    assert tracker.lost_counts == {'service': 0}
    assert (await metrics.get.aio())['loss'].values == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]


async def test_tracker_ends_in_time_while_the_server_is_unreachable(
    gateway: RunningGateway, caplog: pytest.LogCaptureFixture
) -> None:
    """`finish` waits until its own time limit, and does not wait for the client's retries."""
    proxy = ByteProxy(int(gateway.address.rpartition(':')[2]), is_counting_responses=False)
    client = TwinkleClient(await proxy.start(), ADMIN_KEY, retry_timeout=timedelta(seconds=5))
    tracker = open_tracker(metrics=RunMetrics('ad-1', client=client), finish_timeout=0.2)
    await proxy.stop()
    for step in range(3):
        tracker.log({'loss': 1.0}, step=step)
    await asyncio.to_thread(tracker.finish)
    assert tracker.lost_counts == {'service': 3}
    assert 'tracker service did not end its run in time; unsent log calls: 3' in caplog.text
    await asyncio.to_thread(client.close)


async def test_command_draws_curves_and_prints_json(run: Any, metrics: RunMetrics) -> None:
    """`twinkle run show` prints the run with a curve of each metric, or as JSON with all points."""
    empty = await run('run', 'show', 'ad-1')
    assert (empty.exit_code, 'no metrics yet' in empty.stderr) == (0, True)
    for step in range(12):
        await metrics.log.aio({'loss': 4.0 - step / 4, 'reward': math.nan}, step=step)
    shown = await run('run', 'show', 'ad-1')
    assert shown.exit_code == 0, shown.output
    assert 'ad-1: tiny, rank 8, 0 steps' in shown.stdout
    assert 'loss: 1.25 at step 11' in shown.stdout
    assert sum('\u2800' <= character <= '\u28ff' for character in shown.stdout) >= 60
    selected = await run('run', 'show', 'ad-1', '--metric', 'reward')
    assert 'loss' not in selected.stdout
    printed = await run('run', 'show', 'ad-1', '--json')
    begin, end = printed.stdout.index('{'), printed.stdout.rindex('}')
    found = json.loads(printed.stdout[begin : end + 1])
    assert found['metrics']['loss']['values'] == [4.0 - step / 4 for step in range(12)]
    assert found['metrics']['reward']['values'] == ['nan'] * 12
    missing = await run('run', 'show', 'ad-2')
    assert missing.exit_code == 1
    assert "no run 'ad-2'" in missing.stderr


async def test_command_shows_the_last_value_of_a_long_curve(run: Any, metrics: RunMetrics) -> None:
    """The title has the last value even for a reduced curve, and names with brackets are shown unchanged."""
    for step in range(300):
        await metrics.log.aio({'loss[val]': math.sin(step), 'x[/b]': 1.0}, step=step)
    shown = await run('run', 'show', 'ad-1', '--metric', 'loss[val]', '--metric', 'x[/b]', '--metric', 'los')
    assert shown.exit_code == 0, shown.output
    assert f'loss[val]: {math.sin(299):.6g} at step 299' in shown.stdout
    assert 'x[/b]: 1 at step 299' in shown.stdout
    assert "the run has no metric 'los'" in shown.stderr
