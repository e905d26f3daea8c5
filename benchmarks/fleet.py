"""Throughput of one, two and four samplers, and the gap in a stream whose sampler is killed.

The first part measures tokens per second of many streams through the gateway, with each number of samplers in one run.
In the second part, the sampler of a single stream is killed with `kill -9` after some tokens, and the stream
continues on the other sampler.
"""

import asyncio
import itertools
import os
import signal
import statistics
import time
from collections.abc import Callable
from typing import Any

import grpc
import numpy as np

from benchmarks.local_stack import connected, running_stack
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle_client.fleet import FleetAdministration
from twinkle_client.stack import StackState, add_sampler, revive_stack
from twinkle_services.kit.rpc.tensors import tensor_to_proto

STREAMS = 16
SAMPLERS = (1, 2, 4)
NEW_TOKENS = 32
ROUNDS = 3
KILLS = 3
TOKENS_BEFORE_KILL = 12
TOKENS_OF_KILLED_STREAM = 40
JOIN_SECONDS = 120.0


def main() -> dict[str, Any]:
    """Run the comparison and return its figures."""
    with running_stack(engine='torch') as stack:
        rates = {count: _rate_with(stack, count) for count in SAMPLERS}
        gaps = [asyncio.run(_gap(stack)) for _ in range(KILLS)]
    return {
        'engine': 'torch',
        'streams': STREAMS,
        'tokens_per_second': {str(count): round(rate, 1) for count, rate in rates.items()},
        'against_one_sampler': {str(count): round(rate / rates[1], 2) for count, rate in rates.items()},
        'failover': {
            'longest_gap_seconds': [round(gap, 3) for gap, _ in gaps],
            'usual_gap_seconds': round(statistics.median(usual for _, usual in gaps), 3),
        },
    }


def _rate_with(stack: StackState, count: int) -> float:
    """Start samplers until there are `count`, and return their tokens per second."""
    with connected(stack) as client:
        existing = len(FleetAdministration(client=client).list_replicas())
    for _ in range(existing, count):
        add_sampler(stack.state_dir, engine='', report=_ignore_report)
    _wait_for_replicas(stack, count)
    return asyncio.run(_rates(stack))


async def _rates(stack: StackState) -> float:
    """Return the median tokens per second of several rounds of streams."""
    async with grpc.aio.insecure_channel(stack.address) as channel:
        rates: list[float] = []
        for number in range(ROUNDS + 1):
            begin = time.perf_counter()
            seeds = range(STREAMS * number, STREAMS * (number + 1))
            counts = await asyncio.gather(*(_stream(stack, channel, seed, NEW_TOKENS) for seed in seeds))
            rates.append(sum(map(len, counts)) / (time.perf_counter() - begin))
    return statistics.median(rates[1:])


async def _gap(stack: StackState) -> tuple[float, float]:
    """Kill the sampler of a stream; return the longest and the median time between two tokens of the stream."""
    async with grpc.aio.insecure_channel(stack.address) as channel:

        def kill(count: int) -> None:
            if count == TOKENS_BEFORE_KILL:
                _kill_busy_sampler(stack)

        times = await _stream(stack, channel, 0, TOKENS_OF_KILLED_STREAM, on_token=kill)
    if len(times) != TOKENS_OF_KILLED_STREAM:
        raise RuntimeError(f'received {len(times)} tokens instead of {TOKENS_OF_KILLED_STREAM}')
    gaps = [later - earlier for earlier, later in itertools.pairwise(times)]
    await asyncio.to_thread(revive_stack, stack.state_dir, report=_ignore_report)
    await asyncio.to_thread(_wait_for_replicas, stack, max(SAMPLERS))
    return max(gaps), statistics.median(gaps)


async def _stream(
    stack: StackState,
    channel: grpc.aio.Channel,
    seed: int,
    max_tokens: int,
    *,
    on_token: Callable[[int], None] = lambda _: None,
) -> list[float]:
    """Sample one prompt through the gateway; return the arrival time of each token."""
    stub = sampler_service_pb2_grpc.SamplerServiceStub(channel)
    prompt = np.random.default_rng(seed).integers(100, 40_000, 32).astype(np.int32)
    request = wire.SampleRequest(
        base_model=stack.base_model,
        prompt=sampling_pb2.Prompt(token_ids=tensor_to_proto(prompt)),
        params=sampling_pb2.SamplingParams(max_tokens=max_tokens, is_eos_ignored=True, seed=seed),
    )
    times: list[float] = []
    async for response in stub.Sample(request, metadata=(('authorization', f'Bearer {stack.read_api_key()}'),)):
        for _ in range(len(response.delta.token_ids.data) // 4):
            times.append(time.perf_counter())
            on_token(len(times))
    return times


def _kill_busy_sampler(stack: StackState) -> None:
    """Kill the sampler that runs a sequence, to simulate the failure of its machine."""
    state = StackState.load(stack.state_dir)
    with connected(stack) as client:
        replicas = FleetAdministration(client=client).list_replicas()
    busy = max(replicas, key=lambda replica: replica.load.running_sequence_count)
    services = state.services if state is not None else ()
    busy_service = next(service for service in services if service.address == busy.address)
    os.kill(busy_service.pid, signal.SIGKILL)


def _wait_for_replicas(stack: StackState, count: int) -> None:
    end = time.monotonic() + JOIN_SECONDS
    with connected(stack) as client:
        fleet = FleetAdministration(client=client)
        while sum(replica.state == 1 for replica in fleet.list_replicas()) < count:
            if time.monotonic() > end:
                raise RuntimeError(
                    f"fewer than {count} replicas were ready after {JOIN_SECONDS:.0f} s; read the services' logs"
                )
            time.sleep(0.2)


def _ignore_report(service: str, event: str) -> None:
    del service, event
