"""Rate at which a subscriber on the same machine fetches a version as bytes, over gloo, and in shared memory."""

import asyncio
import json
import os
import platform
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.checkpoint_stream import memory_folder, running_service
from twinkle.checkpoint_engine import PackedState, pack_state
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.weights import Devices, DevicesConfig, Segments
from twinkle_services.kit.weights.wire import WeightClient

SIZES_MB = (100, 1000)
ROUNDS = 2
SETTINGS = ('device_transports.names=[gloo]', 'device_transports.min_bytes=1', f'memory_bytes={4 << 30}')


def main() -> dict[str, Any]:
    """Fetch states of several sizes and return the figures."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    result: dict[str, Any] = {}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-')))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-', dir=memory_folder())))
        async with running_service(folder, memory, *SETTINGS) as (channel, _):
            segments, devices = Segments(memory), Devices(DevicesConfig(names=('gloo',), timeout_seconds=60.0))
            clients = [WeightClient(channel), WeightClient(channel, devices=devices)]
            clients.append(WeightClient(channel, segments=segments))
            for size_mb in SIZES_MB:
                adapter_id = f'ad-{size_mb}'
                await clients[-1].publish_version(adapter_id, _state(size_mb * 1_000_000), version=1)
                rates = [await _fetch(client, adapter_id) for client in clients]
                result[f'{size_mb}_mb'] = dict(rates)
    return {**result, 'hardware': {'machine': platform.machine(), 'cpu_count': os.cpu_count()}}


async def _fetch(client: WeightClient, adapter_id: str) -> tuple[str, float]:
    """Return the name of the figure, which contains the encoding, and the best rate in GB/s.

    The time includes the verification of the digest.
    """
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        received = await client.fetch_version(adapter_id)
        seconds.append(time.perf_counter() - begin)
    rate = received.state.manifest.size_bytes / 1e9 / min(seconds)
    return f'{received.encoding.value}_gb_per_second', round(rate, 3)


def _state(size_bytes: int) -> PackedState:
    data = np.random.default_rng(0).integers(0, 1 << 14, size_bytes // 2, np.uint16).tobytes()
    tensor = TensorData('bfloat16', (len(data) // 32, 16), data)
    return pack_state({'base_model.model.q_proj.lora_A.weight': tensor}, base_model='bench', lora_config=LoraConfig())


if __name__ == '__main__':
    print(json.dumps(main(), indent=2))
