"""The Tinker API under load: several tenants with unequal numbers of clients sample and train.

A real stack serves clients that send JSON over HTTP. All clients run in one process, which shares the cores with the
stack. Each tenant has more clients than its fair share of the capacity can serve, so equal shares show that the
gateway's scheduler works. The memory of the gateway's process is measured during the run and for some seconds after it.
"""

import argparse
import asyncio
import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import psutil

from benchmarks.local_stack import connected, running_stack
from benchmarks.tinker_wire import RequestFailed, TinkerWire, batch_of, chunk_of
from twinkle_client.administration import KeyAdministration
from twinkle_client.stack import StackState
from twinkle_client.stack.options import DEFAULT_MODEL

DEMANDS = (0.4, 0.3, 0.2, 0.1)
"""Fraction of the clients per tenant."""
LARGEST_TOKEN = 4000
"""Upper bound of the random token ids, exclusive."""
SETTLE_SECONDS = 5.0
"""Time after the run for which the memory of the gateway is still measured."""
RESPONSE_SECONDS = 120.0
"""Timeout of an HTTP request."""
MIB = 1 << 20


@dataclass
class _Results:
    """Counts and durations of the calls within the measured period, and all errors; times are from `time.monotonic`."""

    period: tuple[float, float] = (0.0, 0.0)
    end: float = 0.0
    seconds: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))
    shares: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    errors: Counter[str] = field(default_factory=Counter)
    gateway_bytes: list[int] = field(default_factory=list[int])

    async def time(self, kind: str, tenant: str, call: Awaitable[Any]) -> None:
        """Await a call. Count the call if it finishes within the measured period, or count its error if it fails."""
        begin = time.monotonic()
        try:
            await call
        except (RequestFailed, aiohttp.ClientError, TimeoutError) as error:
            self.errors[f'{kind}: {error!r}'[:200]] += 1
            return
        now = time.monotonic()
        if self.period[0] <= now < self.period[1]:
            self.seconds[kind].append(now - begin)
            self.shares[kind][tenant] += 1


def main(arguments: Sequence[str] = ()) -> dict[str, Any]:
    """Run the clients and return the figures."""
    options = _parse(arguments)
    with running_stack(options.model, engine=options.engine) as stack:
        keys = _make_keys(stack)
        results, retries = asyncio.run(_load(stack, keys, options))
    return {'options': vars(options), **_figures(results), 'sent_again': retries}


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog='./run bench tinker_load')
    parser.add_argument('--model', default=DEFAULT_MODEL, help='hub id, alias or folder')
    parser.add_argument('--engine', default='auto', help='sampling engine: auto, vllm or torch')
    parser.add_argument('--samplers', type=int, default=256, help='number of concurrent sampling requests')
    parser.add_argument('--trainers', type=int, default=64, help='number of training clients')
    parser.add_argument(
        '--seconds',
        type=float,
        default=120.0,
        help='duration of the measured period; the warm-up takes a quarter of this time in addition',
    )
    parser.add_argument('--new-tokens', type=int, default=8, help='maximum number of tokens per sample')
    parser.add_argument('--tokens', type=int, default=16, help='tokens per prompt and example')
    return parser.parse_args(arguments)


def _make_keys(stack: StackState) -> dict[str, str]:
    with connected(stack) as client:
        keys = KeyAdministration(client=client)
        names = [f'tenant-{index}' for index in range(len(DEMANDS))]
        return {name: keys.create_key(name, scopes=['train', 'sample'])[1] for name in names}


async def _load(stack: StackState, keys: dict[str, str], options: argparse.Namespace) -> tuple[_Results, int]:
    results = _Results()
    async with aiohttp.ClientSession(
        f'http://{stack.http_address}',
        connector=aiohttp.TCPConnector(limit=0),
        timeout=aiohttp.ClientTimeout(total=RESPONSE_SECONDS),
    ) as http:
        wires = {tenant: TinkerWire(http, {'x-api-key': key}) for tenant, key in keys.items()}
        base_model = await wires['tenant-0'].base_model()
        loops = [
            *await _make_clients(_trainer, options.trainers, wires, results, options, base_model),
            *await _make_clients(_sampler, options.samplers, wires, results, options, base_model),
        ]
        begin = time.monotonic() + options.seconds / 4
        results.period, results.end = (begin, begin + options.seconds), begin + options.seconds
        recording = asyncio.create_task(_record_memory(stack, results))
        await asyncio.gather(*(loop() for loop in loops))
        await asyncio.sleep(SETTLE_SECONDS)
        recording.cancel()
        return results, sum(wire.retry_count for wire in wires.values())


_Loop = Callable[[], Awaitable[None]]


async def _make_clients(
    make: Callable[..., Awaitable[_Loop]],
    count: int,
    wires: dict[str, TinkerWire],
    results: _Results,
    options: argparse.Namespace,
    base_model: str,
) -> list[_Loop]:
    tenants = [tenant for tenant, part in zip(wires, DEMANDS, strict=True) for _ in range(round(part * count))]
    random.Random(7).shuffle(tenants)
    return [await make(wires[tenant], tenant, results, options, base_model) for tenant in tenants]


async def _trainer(
    wire: TinkerWire, tenant: str, results: _Results, options: argparse.Namespace, base_model: str
) -> _Loop:
    session_id = await wire.begin_session()
    model_id = await wire.create_model(session_id, number=0, base_model=base_model, rank=8)
    tokens = _tokens(options.tokens + 1)

    async def step(number: int) -> None:
        ids = {'model_id': model_id, 'seq_id': 2 * number - 1}
        backward = await wire.post('forward_backward', {**ids, 'forward_backward_input': batch_of(tokens)})
        ids['seq_id'] += 1
        update = await wire.post('optim_step', {**ids, 'adam_params': {'learning_rate': 1e-4}})
        await wire.result(backward)
        await wire.result(update)

    async def loop() -> None:
        number = 1
        while time.monotonic() < results.end and not results.errors:
            await results.time('train', tenant, step(number))
            number += 1

    return loop


async def _sampler(
    wire: TinkerWire, tenant: str, results: _Results, options: argparse.Namespace, base_model: str
) -> _Loop:
    session_id = await wire.begin_session()
    body = {'session_id': session_id, 'sampling_session_seq_id': 0, 'base_model': base_model}
    handle = (await wire.post('create_sampling_session', body))['sampling_session_id']
    request = {
        'sampling_session_id': handle,
        'num_samples': 1,
        'prompt': chunk_of(_tokens(options.tokens)),
        'sampling_params': {'max_tokens': options.new_tokens, 'temperature': 1.0},
    }

    async def sample(number: int) -> None:
        await wire.result(await wire.post('asample', {**request, 'seq_id': number}))

    async def loop() -> None:
        number = 1
        while time.monotonic() < results.end and not results.errors:
            await results.time('sample', tenant, sample(number))
            number += 1

    return loop


async def _record_memory(stack: StackState, results: _Results) -> None:
    (pid,) = [service.pid for service in stack.services if service.name == 'gateway']
    process = psutil.Process(pid)
    while True:
        results.gateway_bytes.append(process.memory_info().rss)
        await asyncio.sleep(0.5)


def _tokens(count: int) -> list[int]:
    return [random.randrange(10, LARGEST_TOKEN) for _ in range(count)]


def _figures(results: _Results) -> dict[str, Any]:
    quarter = max(1, len(results.gateway_bytes) // 4)
    return {
        'errors': dict(results.errors),
        **{kind: _figures_of(seconds, results.shares[kind]) for kind, seconds in sorted(results.seconds.items())},
        'gateway_mib': {
            'first_quarter': round(statistics.mean(results.gateway_bytes[:quarter]) / MIB, 1),
            'last_quarter': round(statistics.mean(results.gateway_bytes[-quarter:]) / MIB, 1),
            'most': round(max(results.gateway_bytes) / MIB, 1),
        },
    }


def _figures_of(seconds: list[float], shares: Counter[str]) -> dict[str, Any]:
    hundredths = statistics.quantiles(seconds, n=100) if len(seconds) > 1 else [seconds[0]] * 99
    mean = statistics.mean(shares.values())
    return {
        'count': len(seconds),
        'seconds': {'p50': round(hundredths[49], 3), 'p99': round(hundredths[98], 3)},
        'by_tenant': dict(sorted(shares.items())),
        'furthest_from_fair_share': round(max(abs(count / mean - 1) for count in shares.values()), 3),
        'goal': '<= 0.1',
    }
