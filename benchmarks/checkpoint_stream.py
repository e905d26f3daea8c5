"""Measures the time until a publish returns and a subscriber has the version, through shared memory and as bytes.

The weights are bfloat16. Consecutive versions differ by a small update, as in training.
"""

import asyncio
import json
import os
import platform
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from pathlib import Path
from typing import Any

import grpc
import numpy as np

from twinkle.checkpoint_engine import PackedState, pack_state, write_peft_folder
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Segments
from twinkle_services.kit.weights.wire import ReceivedState, WeightClient

SIZES_MIB = (1, 10, 100)
ROUNDS = 5
TENANT = Caller(tenant_id='bench', is_internal=True)


def main() -> dict[str, Any]:
    """Transfer states of several sizes and return the figures."""
    return asyncio.run(_measure())


async def _measure() -> dict[str, Any]:
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-')))
        memory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix='twinkle-bench-', dir=memory_folder())))
        async with running_service(folder, memory) as (channel, process_id):
            result: dict[str, Any] = {'service_idle_mib': _resident_mib(process_id)}
            for size_mib in SIZES_MIB:
                states = [state_of(size_mib, seed=seed) for seed in range(ROUNDS)]
                result[f'{size_mib}_mib'] = {
                    'shared_memory': await _transfer(
                        WeightClient(channel, segments=Segments(memory)), states, 'shared'
                    ),
                    'bytes': await _transfer(WeightClient(channel), states, 'bytes'),
                    'synced_peft_folder_seconds': _write_folder(folder, size_mib),
                }
            result['service_after_mib'] = _resident_mib(process_id)
    return {**result, 'hardware': {'machine': platform.machine(), 'cpu_count': os.cpu_count()}}


async def _transfer(client: WeightClient, states: Sequence[PackedState], kind: str) -> dict[str, Any]:
    """Publish, fetch and follow versions; return figures from the shortest time of each operation."""
    size_bytes = states[0].manifest.size_bytes
    adapter_id = f'ad-{kind}-{size_bytes}'
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
                raise RuntimeError('the received state differs from the published state')
            begin = time.perf_counter()
            await client.fetch_version(adapter_id, number)
            fetch.append(time.perf_counter() - begin)
    return {
        'publish_to_answer_seconds': round(min(publish), 4),
        'publish_to_received_seconds': round(min(live), 4),
        'received_as': event.encoding.value,
        'wire_bytes_of_a_version': event.wire_size_bytes,
        'publish_gb_per_second': round(size_bytes / 1e9 / min(publish), 3),
        'fetch_gb_per_second': round(size_bytes / 1e9 / min(fetch), 3),
    }


def _write_folder(folder: Path, size_mib: int) -> float:
    """Write weights of the same size as a peft folder with fsync; return the shortest time in seconds."""
    tensors = _tensors(size_mib, seed=0)
    seconds: list[float] = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        write_peft_folder(folder / 'peft', tensors, LoraConfig(), base_model='bench')
        seconds.append(time.perf_counter() - begin)
    return round(min(seconds), 4)


def state_of(size_mib: int, *, seed: int) -> PackedState:
    """Return a state of the given size after `seed` small updates."""
    return pack_state(_tensors(size_mib, seed), base_model='bench', lora_config=LoraConfig())


def _tensors(size_mib: int, seed: int) -> dict[str, TensorData]:
    """Return 200 tensors after `seed` small updates; an adapter of a small model has about as many."""
    rows = size_mib * 2**20 // 200 // 32
    values = np.random.default_rng(0).normal(scale=0.02, size=(200, rows, 16)).astype(np.float32)
    for update in range(1, seed + 1):
        values += np.random.default_rng(update).normal(scale=1e-4, size=values.shape).astype(np.float32)
    upper_halves = (values.view(np.uint32) >> 16).astype(np.uint16)
    return {
        f'base_model.model.layers.{index}.q_proj.lora_A.weight': TensorData('bfloat16', (rows, 16), half.tobytes())
        for index, half in enumerate(upper_halves)
    }


@asynccontextmanager
async def running_service(folder: Path, memory: Path, *settings: str) -> AsyncIterator[tuple[grpc.aio.Channel, int]]:
    """Run the service in a separate process and yield a channel to it and its process id."""
    address_file = folder / 'address.json'
    settings = (
        *settings,
        f'state_dir={folder}',
        f'address_file={address_file}',
        f'shared_memory.folder={memory}',
        'telemetry.log_level=ERROR',
    )
    words = [word for setting in settings for word in ('--set', setting)]
    process = await asyncio.create_subprocess_exec(sys.executable, '-m', 'twinkle_services.checkpoint', *words)
    try:
        while not address_file.exists():
            if process.returncode is not None:
                raise RuntimeError(f'the checkpoint service exited with status {process.returncode}')
            await asyncio.sleep(0.02)
        channel = open_channel(json.loads(address_file.read_text())['address'])
        with acting_for(TENANT):
            yield channel, process.pid
        await channel.close()
    finally:
        process.terminate()
        await process.wait()


def memory_folder() -> str | None:
    """Return the folder of shared memory, or None if the system has no such folder."""
    folder = Path('/dev/shm')  # noqa: S108 (the mount point of the kernel)
    return str(folder) if folder.is_dir() else None


def _resident_mib(process_id: int) -> float:
    """Return the resident memory of a process in MiB."""
    status = Path(f'/proc/{process_id}/status').read_text(encoding='ascii')
    kilobytes = next(line.split()[1] for line in status.splitlines() if line.startswith('VmRSS:'))
    return round(int(kilobytes) / 1024, 1)


if __name__ == '__main__':
    print(json.dumps(main(), indent=2))
