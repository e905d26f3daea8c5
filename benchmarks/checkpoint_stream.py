"""Bytes per second into and out of the checkpoint service over loopback, and what it holds in memory."""

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

from services.kit.caller import Caller
from services.kit.rpc.channel import open_channel
from services.kit.rpc.context import acting_for
from services.kit.rpc.weight_client import ReceivedState, WeightClient
from twinkle.checkpoint_engine import PackedState, pack_state, write_peft_folder
from twinkle.data_format import LoraConfig, TensorData

SIZES_MIB = (1, 10, 100)
ROUNDS = 5
TENANT = Caller(tenant_id='bench', is_internal=True)


def main() -> dict[str, Any]:
    """Move states of several sizes and return the figures."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix='twinkle-bench-') as folder:
        async with _service(Path(folder)) as (client, process_id):
            result: dict[str, Any] = {'service_idle_mib': _resident_mib(process_id)}
            for size_mib in SIZES_MIB:
                result[f'{size_mib}_mib'] = await _move(client, size_mib)
                result[f'{size_mib}_mib']['peft_folder_write_seconds'] = _write_folder(Path(folder), size_mib)
            result['service_after_mib'] = _resident_mib(process_id)
    return {**result, 'hardware': {'machine': platform.machine(), 'cpu_count': os.cpu_count()}}


async def _move(client: WeightClient, size_mib: int) -> dict[str, float]:
    """Publish, fetch and follow versions; return the best of the rounds."""
    states = [_state(size_mib, seed) for seed in range(ROUNDS)]
    adapter_id = f'ad-{size_mib}'
    publish, fetch, live = [], [], []
    async with aclosing(client.follow(adapter_id)) as events:
        for number, state in enumerate(states, start=1):
            begin = time.perf_counter()
            await client.publish_version(adapter_id, state, version=number)
            publish.append(time.perf_counter() - begin)
            while not isinstance(event := await anext(events), ReceivedState):
                pass
            live.append(time.perf_counter() - begin)
            if event.state.manifest != state.manifest:
                raise RuntimeError('another state came than was published')
            begin = time.perf_counter()
            await client.fetch_version(adapter_id, number)
            fetch.append(time.perf_counter() - begin)
    size_gb = size_mib * 2**20 / 1e9
    return {
        'publish_gb_per_second': round(size_gb / min(publish), 3),
        'fetch_gb_per_second': round(size_gb / min(fetch), 3),
        'publish_to_received_seconds': round(min(live), 4),
    }


def _write_folder(folder: Path, size_mib: int) -> float:
    """Return the seconds that writing the same weights as a synced peft folder takes."""
    tensors = _tensors(size_mib, seed=0)
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        write_peft_folder(folder / 'peft', tensors, LoraConfig(), base_model='bench')
        seconds.append(time.perf_counter() - begin)
    return round(min(seconds), 4)


def _state(size_mib: int, seed: int) -> PackedState:
    return pack_state(_tensors(size_mib, seed), base_model='bench', lora_config=LoraConfig())


def _tensors(size_mib: int, seed: int) -> dict[str, TensorData]:
    """Return 200 tensors, as many as an adapter of a small model has."""
    rows = size_mib * 2**20 // 200 // 32
    random = (seed + 1).to_bytes(1, 'little')
    return {
        f'base_model.model.layers.{index}.q_proj.lora_A.weight': TensorData(
            'bfloat16', (rows, 16), random * (32 * rows)
        )
        for index in range(200)
    }


@asynccontextmanager
async def _service(folder: Path) -> AsyncIterator[tuple[WeightClient, int]]:
    """Run the service as a process of its own and give a client of it."""
    address_file = folder / 'address.json'
    settings = (f'state_dir={folder}', f'address_file={address_file}', 'telemetry.log_level=ERROR')
    words = [word for setting in settings for word in ('--set', setting)]
    process = await asyncio.create_subprocess_exec(sys.executable, '-m', 'services.checkpoint', *words)
    try:
        while not address_file.exists():
            if process.returncode is not None:
                raise RuntimeError(f'the service ended with {process.returncode}')
            await asyncio.sleep(0.02)
        channel = open_channel(json.loads(address_file.read_text())['address'])
        with acting_for(TENANT):
            yield WeightClient(channel), process.pid
        await channel.close()
    finally:
        process.terminate()
        await process.wait()


def _resident_mib(process_id: int) -> float:
    """Return what a process holds in memory."""
    status = Path(f'/proc/{process_id}/status').read_text(encoding='ascii')
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith('VmRSS:'))
    return round(int(kilobytes) / 1024, 1)


if __name__ == '__main__':
    print(json.dumps(main(), indent=2))
