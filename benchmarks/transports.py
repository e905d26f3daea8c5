"""Bytes per second of a version's weights: Twinkle's stream and shared memory, uvicorn + httpx, and ZeroMQ.

The transports alternate within one run. The checkpoint service serves Twinkle's two transports. Each other transport
has a separate server process. The stream of the checkpoint service is resumable and verifies xxh3 for each chunk and
blake3 for the state; httpx and ZeroMQ transfer bytes without checks.
"""

import asyncio
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import httpx
import zmq
import zmq.asyncio

from benchmarks.checkpoint_stream import memory_folder, running_service, state_of
from benchmarks.transport_servers import CHUNK_BYTES, ZMQ_WINDOW
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.weights.wire import WeightClient

ADAPTER = 'ad-bench'
SIZE_MIB = 128
ROUNDS = 7

Transfer = Callable[[], Awaitable[int]]


def main() -> dict[str, Any]:
    """Transfer the same bytes with each transport and return the figures."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-')))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-', dir=memory_folder())))
        http = stack.enter_context(_server('http'))
        zmq_server = stack.enter_context(_server('zmq'))
        async with running_service(folder, memory) as (channel, process_id):
            publisher = WeightClient(channel, segments=Segments(memory))
            await publisher.publish_version(ADAPTER, state_of(SIZE_MIB, seed=1), version=1)
            wire = WeightClient(channel)
            transfers: dict[str, tuple[Transfer, int]] = {
                'twinkle_stream': (lambda: _fetch(wire), process_id),
                'uvicorn_httpx': (lambda: _http(http.address), http.process_id),
                'zeromq': (lambda: _zmq(zmq_server.address), zmq_server.process_id),
                'twinkle_shared_memory': (lambda: _fetch(publisher), process_id),
            }
            figures = await _rounds(transfers)
    return {'size_mib': SIZE_MIB, **figures, **_ratios(figures)}


async def _rounds(transfers: dict[str, tuple[Transfer, int]]) -> dict[str, Any]:
    seconds: dict[str, list[float]] = {name: [] for name in transfers}
    cpu: dict[str, list[float]] = {name: [] for name in transfers}
    for _ in range(ROUNDS):
        for name, (transfer, server_id) in transfers.items():
            busy, begin = time.process_time() + _cpu_seconds(server_id), time.perf_counter()
            count = await transfer()
            seconds[name].append(time.perf_counter() - begin)
            cpu[name].append(time.process_time() + _cpu_seconds(server_id) - busy)
            if abs(count - (SIZE_MIB << 20)) > CHUNK_BYTES:
                raise RuntimeError(f'{name} transferred {count} bytes instead of {SIZE_MIB << 20}')
    size_gb = (SIZE_MIB << 20) / 1e9
    return {
        name: {
            'gb_per_second': round(size_gb / statistics.median(seconds[name]), 3),
            'best_gb_per_second': round(size_gb / min(seconds[name]), 3),
            'cpu_seconds_per_gb_both_ends': round(statistics.median(cpu[name]) / size_gb, 2),
        }
        for name in transfers
    }


def _ratios(figures: dict[str, Any]) -> dict[str, Any]:
    twinkle = figures['twinkle_stream']['gb_per_second']
    return {
        'against_uvicorn_httpx': round(twinkle / figures['uvicorn_httpx']['gb_per_second'], 2),
        'against_zeromq': round(twinkle / figures['zeromq']['gb_per_second'], 2),
        'goal': '>= 3 and >= 0.5',
    }


async def _fetch(client: WeightClient) -> int:
    received = await client.fetch_version(ADAPTER, 1)
    return len(received.state.data)


async def _http(address: str) -> int:
    count = 0
    async with httpx.AsyncClient() as client, client.stream('GET', f'http://{address}/') as response:
        buffer = bytearray(SIZE_MIB << 20)
        async for chunk in response.aiter_bytes():
            buffer[count : count + len(chunk)] = chunk
            count += len(chunk)
    return count


async def _zmq(address: str) -> int:
    context = zmq.asyncio.Context.instance()
    reader = context.socket(zmq.DEALER)
    reader.connect(f'tcp://{address}')
    try:
        await reader.send(b'begin')
        count, size = 0, SIZE_MIB << 20
        buffer = bytearray(size)
        while count < size:
            frame = await reader.recv(copy=False)
            buffer[count : count + len(frame)] = frame.buffer
            count += len(frame)
            if count + (ZMQ_WINDOW - 1) * CHUNK_BYTES < size:
                await reader.send(b'more')
        return count
    finally:
        reader.close(linger=0)


class _Server:
    """Process id and address of a plain server."""

    def __init__(self, process: 'subprocess.Popen[str]') -> None:
        assert process.stdout is not None
        self.process_id = process.pid
        self.address = process.stdout.readline().strip()


@contextmanager
def _server(kind: str) -> Iterator[_Server]:
    command = [sys.executable, '-m', 'benchmarks.transport_servers', kind, str(SIZE_MIB)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[1]) as process:
        try:
            yield _Server(process)
        finally:
            process.terminate()


def _cpu_seconds(process_id: int) -> float:
    """Return the CPU time in seconds that a process has used so far."""
    fields = Path(f'/proc/{process_id}/stat').read_text(encoding='ascii').rpartition(')')[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf('SC_CLK_TCK')
