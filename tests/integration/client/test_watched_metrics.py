"""The client's watches of metrics, including across a killed gateway, and `twinkle run show --follow`."""

import asyncio
import os
import pty
import signal
import sys
from collections.abc import AsyncIterator
from contextlib import aclosing
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.byte_proxy import ByteProxy
from fixtures.faulty_service import free_port
from fixtures.gateway_process import gateway_process
from fixtures.gateway_run import client_with_run, command_line, gateway_with_run
from fixtures.gateway_upstream import TOKEN, Upstream, adapter_event
from fixtures.running_gateway import ADMIN_KEY, RunningGateway
from twinkle_client import NotFoundError, TwinkleClient, UsageError
from twinkle_client.metrics import MetricUpdate, RunMetrics


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway with the run 'ad-1'."""
    async with gateway_with_run(tmp_path) as running:
        yield running


@pytest.fixture
async def metrics(gateway: RunningGateway) -> AsyncIterator[RunMetrics]:
    """Metrics of the run 'ad-1'."""
    async with client_with_run(gateway) as client:
        yield RunMetrics('ad-1', client=client)


def values_of(update: MetricUpdate) -> dict[str, list[float]]:
    """Return the values of an update by name."""
    return {name: list(series.values) for name, series in update.series.items()}


async def test_watch_yields_stored_and_new_points(metrics: RunMetrics) -> None:
    """A watch first sends the stored points, then new and replaced points, of the selected metrics and steps."""
    await metrics.log.aio({'loss': 1.0, 'rate': 0.1}, step=0)
    curves: dict[str, Any] = {}
    watching: Any = metrics.watch.aio(['loss'], begin_step=0)
    async with aclosing(watching) as updates:
        first = await anext(updates)
        assert (first.is_snapshot, values_of(first)) == (True, {'loss': [1.0]})
        curves = first.applied_to(curves)
        await metrics.log.aio({'rate': 0.2}, step=1)
        await metrics.log.aio({'loss': 2.0}, step=1)
        second = await anext(updates)
        assert (second.is_snapshot, values_of(second)) == (False, {'loss': [2.0]})
        await metrics.log.aio({'loss': 9.0}, step=0)
        curves = (await anext(updates)).applied_to(second.applied_to(curves))
    assert curves == await metrics.get.aio(['loss'])


async def test_blocking_watch_ends_with_its_loop(metrics: RunMetrics) -> None:
    """The blocking form of a watch yields the same updates, and leaving the loop ends the call."""
    await metrics.log.aio({'loss': 1.0}, step=0)

    def read() -> list[dict[str, list[float]]]:
        found: list[dict[str, list[float]]] = []
        for update in metrics.watch():
            found.append(values_of(update))
            if len(found) == 2:
                break
            metrics.log({'loss': 2.0}, step=1)
        return found

    assert await asyncio.to_thread(read) == [{'loss': [1.0]}, {'loss': [2.0]}]


async def test_wrong_arguments_are_refused(gateway: RunningGateway, metrics: RunMetrics) -> None:
    """An invalid argument raises an error when the iteration begins; an unknown run is not found."""
    with pytest.raises(TypeError, match='names'):
        await anext(metrics.watch.aio('loss'))
    with pytest.raises(UsageError, match='max_points'):
        await anext(metrics.watch.aio(max_points=1))
    client = TwinkleClient(gateway.address, ADMIN_KEY)
    with pytest.raises(NotFoundError, match='ad-9'):
        await anext(RunMetrics('ad-9', client=client).watch.aio())
    await asyncio.to_thread(client.close)


async def test_watch_continues_after_the_gateway_was_killed(tmp_path: Path) -> None:
    """A watch resumes at a restarted gateway without a snapshot, and each point arrives once."""
    upstream = Upstream()
    upstream.adapters.watch.snapshot = [adapter_event('ad-1')]
    address = f'127.0.0.1:{free_port()}'
    async with upstream.serving():
        settings: dict[str, Any] = {'listen': address, 'internal_token': TOKEN, 'upstreams__model': upstream.address}
        client = TwinkleClient(address, ADMIN_KEY, retry_timeout=timedelta(seconds=90))
        metrics = RunMetrics('ad-1', client=client)
        updates: Any = metrics.watch.aio()
        found: list[tuple[bool, dict[str, list[float]]]] = []
        for number in range(3):
            for name in ('address.json', 'http.json'):
                (tmp_path / name).unlink(missing_ok=True)
            async with gateway_process(tmp_path, **settings) as running:
                await metrics.log.aio({'loss': float(number)}, step=number)
                update = await anext(updates)
                found.append((update.is_snapshot, values_of(update)))
                running.process.kill()
        await updates.aclose()
        await asyncio.to_thread(client.close)
    assert found == [(True, {'loss': [0.0]}), (False, {'loss': [1.0]}), (False, {'loss': [2.0]})]


async def test_watch_of_a_lost_connection_has_no_gap(gateway: RunningGateway, metrics: RunMetrics) -> None:
    """Points that are stored while the connection is lost arrive after the reconnection."""
    proxy = ByteProxy(int(gateway.address.rpartition(':')[2]), is_counting_responses=False)
    address = await proxy.start()
    client = TwinkleClient(address, ADMIN_KEY)
    watching: Any = RunMetrics('ad-1', client=client).watch.aio()
    async with aclosing(watching) as updates:
        assert values_of(await anext(updates)) == {}
        for number in range(3):
            await proxy.stop()
            await metrics.log.aio({'loss': float(number)}, step=number)
            await proxy.start(int(address.rpartition(':')[2]))
            update = await anext(updates)
            assert (update.is_snapshot, values_of(update)) == (False, {'loss': [float(number)]})
    await asyncio.to_thread(client.close)
    await proxy.stop()


def _command(*arguments: str) -> list[str]:
    return [sys.executable, '-m', 'twinkle_client.cli', 'run', 'show', 'ad-1', '--follow', *arguments]


def _environment(gateway: RunningGateway) -> dict[str, str]:
    url = f'http://{gateway.address}'
    return {**os.environ, 'TWINKLE_SERVER_URL': url, 'TWINKLE_API_KEY': ADMIN_KEY, 'TERM': 'xterm', 'COLUMNS': '100'}


async def test_command_draws_curves_again_until_an_interrupt(gateway: RunningGateway, metrics: RunMetrics) -> None:
    """A terminal shows the curves again after each change, and Ctrl-C leaves a visible cursor."""
    await metrics.log.aio({'loss': 4.0}, step=0)
    controller, terminal = pty.openpty()
    environment = {**_environment(gateway), 'LINES': '40'}
    process = await asyncio.create_subprocess_exec(*_command(), stdout=terminal, stderr=terminal, env=environment)
    os.close(terminal)
    text = ''
    for step in range(1, 4):
        while f'loss: {4.0 / step:.6g} at step {step - 1}' not in text:
            text += (await asyncio.to_thread(os.read, controller, 1 << 16)).decode()
        await metrics.log.aio({'loss': 4.0 / (step + 1)}, step=step)
    assert sum('\u2801' <= character <= '\u28ff' for character in text) > 10
    process.send_signal(signal.SIGINT)
    while 'interrupted' not in text:
        text += (await asyncio.to_thread(os.read, controller, 1 << 16)).decode()
    assert await process.wait() == 130
    os.close(controller)
    assert text.rindex('\x1b[?25h') > text.rindex('\x1b[?25l')
    assert 'Traceback' not in text


async def test_command_prints_values_into_a_pipe(gateway: RunningGateway, metrics: RunMetrics) -> None:
    """Each stored value is a line with its step and name if the output is not a terminal."""
    await metrics.log.aio({'loss': 4.0, 'rate': 0.5}, step=0)
    process = await asyncio.create_subprocess_exec(
        *_command('--metric', 'loss'), stdout=asyncio.subprocess.PIPE, env=_environment(gateway)
    )
    assert process.stdout is not None
    assert (await process.stdout.readline()).decode().startswith('ad-1: tiny, rank 8')
    assert (await process.stdout.readline()).decode() == '0 loss 4\n'
    await metrics.log.aio({'loss': 2.5, 'rate': 0.25}, step=1)
    assert (await process.stdout.readline()).decode() == '1 loss 2.5\n'
    process.send_signal(signal.SIGINT)
    assert await process.wait() == 130


async def test_command_refuses_json_of_a_followed_run(gateway: RunningGateway, monkeypatch: pytest.MonkeyPatch) -> None:
    """The options --follow and --json exclude each other."""
    refused = await command_line(monkeypatch, gateway.address)('run', 'show', 'ad-1', '--follow', '--json')
    assert refused.exit_code == 2
    assert '--follow draws curves and --json prints all points once' in refused.stderr
