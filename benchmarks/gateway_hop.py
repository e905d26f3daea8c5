"""Time that the gateway adds to a unary call: direct calls and calls through the gateway alternate within one run.

Client, gateway and service are separate processes, as in a deployment. There is one call at a time, so the figures do
not include waiting in a queue.
"""

import asyncio
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, ExitStack, contextmanager
from pathlib import Path
from typing import Any

import grpc

from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc
from twinkle_services.kit.rpc.auth import TENANT_KEY

WARM_UP_CALLS = 300
ROUNDS = 20
CALLS_PER_ROUND = 100
START_SECONDS = 60
TOKEN = 'token-of-the-benchmark'  # noqa: S105 (only for processes on loopback)
KEY = 'tml-key-of-the-benchmark'
ADAPTER_ID = 'ad-benchmark'


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as name, ExitStack() as stack:
        folder = Path(name)
        settings = {'internal_token': TOKEN, 'telemetry.log_level': 'WARNING'}
        with_adapter, without = {**settings, 'adapter_id': ADAPTER_ID}, {**settings, 'base_model': 'another'}
        model = stack.enter_context(running_process('benchmarks.idle_model', folder / 'model', with_adapter))
        second = stack.enter_context(running_process('benchmarks.idle_model', folder / 'second', without))
        settings |= {'bootstrap_key': KEY}
        one, two = {'upstreams.model': model}, {'upstreams.models': f'["{second}", "{model}"]'}
        gateway = stack.enter_context(
            running_process('twinkle_services.gateway', folder / 'gateway', {**settings, **one})
        )
        router = stack.enter_context(
            running_process('twinkle_services.gateway', folder / 'router', {**settings, **two})
        )
        return asyncio.run(_measure(model, gateway, router))


async def _measure(model: str, gateway: str, router: str) -> dict[str, Any]:
    routes = {
        'direct': (model, (('authorization', f'Bearer {TOKEN}'), (TENANT_KEY, 'default'))),
        'through_gateway': (gateway, (('authorization', f'Bearer {KEY}'),)),
        # This gateway must determine which of two model services has the adapter.
        'through_gateway_of_two': (router, (('authorization', f'Bearer {KEY}'),)),
    }
    seconds: dict[str, list[float]] = {route: [] for route in routes}
    async with AsyncExitStack() as stack:
        created = {route: grpc.aio.insecure_channel(address) for route, (address, _) in routes.items()}
        channels = {route: await stack.enter_async_context(channel) for route, channel in created.items()}
        for route, (_, metadata) in routes.items():
            await call_times(channels[route], metadata, WARM_UP_CALLS)
        for _ in range(ROUNDS):
            for route, (_, metadata) in routes.items():
                seconds[route] += await call_times(channels[route], metadata, CALLS_PER_ROUND)
    figures = {route: milliseconds(samples) for route, samples in seconds.items()}
    added = {route: _added(figures[route], figures['direct']) for route in routes if route != 'direct'}
    return {
        'calls_each': ROUNDS * CALLS_PER_ROUND,
        'milliseconds': figures,
        'added_milliseconds': added,
        'goal_added_milliseconds_p50': '< 1 on an idle machine',
    }


def _added(figures: dict[str, float], direct: dict[str, float]) -> dict[str, float]:
    return {name: round(figures[name] - direct[name], 3) for name in ('p50', 'p99')}


async def call_times(channel: grpc.aio.Channel, metadata: tuple[tuple[str, str], ...], count: int) -> list[float]:
    """Call the idle model service `count` times, one call at a time, and return the durations in seconds."""
    stub = adapter_service_pb2_grpc.AdapterServiceStub(channel)
    request = adapter_service_pb2.GetAdapterRequest(adapter_id=ADAPTER_ID)
    seconds: list[float] = []
    for _ in range(count):
        begin = time.perf_counter()
        await stub.GetAdapter(request, metadata=metadata)
        seconds.append(time.perf_counter() - begin)
    return seconds


def milliseconds(seconds: list[float]) -> dict[str, float]:
    """Return median, 99th percentile and minimum in milliseconds."""
    hundredths = statistics.quantiles(seconds, n=100)
    return {
        'p50': round(1000 * statistics.median(seconds), 3),
        'p99': round(1000 * hundredths[98], 3),
        'best': round(1000 * min(seconds), 3),
    }


@contextmanager
def running_process(module: str, state_dir: Path, settings: dict[str, str]) -> Iterator[str]:
    """Run a service and yield its address; terminate it at the end."""
    address_file = state_dir / 'address.json'
    command = [sys.executable, '-m', module]
    for field, value in {**settings, 'state_dir': str(state_dir), 'address_file': str(address_file)}.items():
        command += ['--set', f'{field}={value}']
    with subprocess.Popen(command, cwd=Path(__file__).parents[1]) as process:
        try:
            deadline = time.monotonic() + START_SECONDS
            while not address_file.exists():
                if process.poll() is not None or time.monotonic() > deadline:
                    raise RuntimeError(f'{module} exited or did not start within {START_SECONDS} s; read its output')
                time.sleep(0.02)
            yield json.loads(address_file.read_text(encoding='utf-8'))['address']
        finally:
            process.terminate()
