"""Tests that a kill of a real sampler during a stream changes no response of the gateway."""

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from fixtures.fake_samplers import until
from fixtures.fleet import RunningFleet, running_fleet
from fixtures.gateway_upstream import TOKEN
from fixtures.running_gateway import ADMIN
from fixtures.sampled_answers import ints, numbers
from fixtures.source_tree import ROOT
from fixtures.tiny_model import build_tiny_model
from twinkle.api.gateway.v1 import fleet_service_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2


@contextmanager
def sampler_process(folder: Path, model: Path, gateway: str) -> Iterator[subprocess.Popen[bytes]]:
    """Run a sampler process that joins the fleet, and kill it at the end."""
    folder.mkdir()
    settings = {
        'base_model': model,
        'gateways': f'[{gateway}]',
        'checkpoint_address': '127.0.0.1:1',
        'internal_token': TOKEN,
        'state_dir': folder,
    }
    command = [sys.executable, '-m', 'twinkle_services.sampler']
    for field, value in settings.items():
        command += ['--set', f'{field}={value}']
    environment = {**os.environ, 'OMP_NUM_THREADS': '1', 'PYTHONPATH': f'{ROOT / "sdk" / "python"}:{ROOT}'}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        yield process
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGKILL)
        process.wait()


async def wait_until_ready(fleet: RunningFleet, count: int) -> dict[str, fleet_service_pb2.Replica]:
    """Wait until `count` replicas are ready, and return them by id."""
    while True:
        ready = {
            name: replica
            for name, replica in (await fleet.replicas()).items()
            if replica.state == fleet_service_pb2.REPLICA_STATE_READY
        }
        if len(ready) == count:
            return ready
        await asyncio.sleep(0)


def greedy_request(model: Path, index: int) -> wire.SampleRequest:
    """Return a long greedy request."""
    return wire.SampleRequest(
        base_model=str(model),
        prompt=sampling_pb2.Prompt(token_ids=ints([1, 40 + index, 50, 60 + index])),
        params=sampling_pb2.SamplingParams(max_tokens=200, temperature=0, is_eos_ignored=True),
    )


async def read_stream(call, received: list[int] | None = None) -> tuple[list[int], str]:
    """Return the tokens and the text of a stream, and record the tokens as they arrive."""
    tokens: list[int] = [] if received is None else received
    text = ''
    async for response in call:
        if response.HasField('delta'):
            tokens += numbers(response.delta.token_ids)
            text += response.delta.text
        elif response.HasField('finished'):
            text += response.finished.text
    return tokens, text


def listener_at(address: str, processes: list[subprocess.Popen[bytes]]) -> subprocess.Popen[bytes]:
    """Return the process that listens on an address."""
    port = int(address.rpartition(':')[2])
    for process in processes:
        connections = psutil.Process(process.pid).net_connections(kind='tcp')
        if any(item.status == psutil.CONN_LISTEN and item.laddr.port == port for item in connections):
            return process
    raise AssertionError(f'no sampler process listens on {address}')


@pytest.mark.slow
@pytest.mark.timeout(300)
async def test_killed_sampler_changes_no_response(tmp_path: Path) -> None:
    """Greedy streams return the tokens and texts of a run without a kill even if their sampler is killed."""
    model = build_tiny_model(tmp_path / 'model')
    async with running_fleet(tmp_path / 'gateway') as fleet:
        gateway = fleet.gateway.address
        with (
            sampler_process(tmp_path / 'a', model, gateway) as first,
            sampler_process(tmp_path / 'b', model, gateway) as second,
        ):
            replicas = await wait_until_ready(fleet, 2)
            requests = [greedy_request(model, index) for index in range(4)]
            expected = [await read_stream(fleet.stub.Sample(request, metadata=ADMIN)) for request in requests]
            received: list[list[int]] = [[] for _ in requests]
            read_tasks = [
                asyncio.ensure_future(read_stream(fleet.stub.Sample(request, metadata=ADMIN), tokens))
                for request, tokens in zip(requests, received, strict=True)
            ]
            await until(lambda: all(len(tokens) > 20 for tokens in received))
            busiest = max((await fleet.replicas()).values(), key=lambda replica: replica.load.running_sequence_count)
            assert busiest.replica_id in replicas
            listener_at(busiest.address, [first, second]).kill()
            results = await asyncio.gather(*read_tasks)
            assert results == expected
            await fleet.until_state(busiest.replica_id, fleet_service_pb2.REPLICA_STATE_LOST)
