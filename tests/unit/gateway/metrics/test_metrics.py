"""Logging to runs that the gateway does not know yet, and the division of points into chunks."""

import asyncio
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from twinkle_services.gateway.catalogue.runs import TenantTurns
from twinkle_services.gateway.errors import RunNotFound
from twinkle_services.gateway.metrics.chunks import CHUNK_POINTS, chunks_of, count_of, joined, merge_all
from twinkle_services.gateway.metrics.metrics import Metrics
from twinkle_services.gateway.metrics.rules import MAX_STEP, MetricFilter, Point, PointLimits
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock

ALICE = Caller(tenant_id='alice')


class _Runs:
    """Runs that are unknown for a number of calls."""

    def __init__(self, unknown_calls: int) -> None:
        self.unknown_calls = unknown_calls

    async def get(self, caller: Caller, run_id: str) -> None:
        self.unknown_calls -= 1
        if self.unknown_calls >= 0:
            raise RunNotFound(run_id)


class _Store:
    """Store that records the arguments of its calls."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    async def save(self, *arguments: Any, **options: Any) -> None:
        self.saved.append((arguments, options))

    async def list_of(self, *arguments: Any) -> list[Any]:
        return []


class _SlowStore(_Store):
    """Store whose calls wait for the test. It counts the running calls of each tenant."""

    def __init__(self) -> None:
        super().__init__()
        self.running: Counter[str] = Counter()
        self.continued = asyncio.Event()

    async def save(self, *arguments: Any, **options: Any) -> None:
        await self._wait(arguments[0])
        await super().save(*arguments, **options)

    async def list_of(self, *arguments: Any) -> list[Any]:
        await self._wait(arguments[0])
        return []

    async def _wait(self, tenant_id: str) -> None:
        self.running[tenant_id] += 1
        await self.continued.wait()
        self.running[tenant_id] -= 1


def _metrics(unknown_calls: int) -> tuple[Any, _Store, list[float]]:
    store, pauses = _Store(), list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    runs: Any = _Runs(unknown_calls)
    stored: Any = store
    return (
        Metrics(
            stored,
            runs,
            clock=FakeClock(),
            limits_of=lambda _: PointLimits(per_run=9),
            turns=TenantTurns(),
            pause=pause,
        ),
        store,
        pauses,
    )


@pytest.mark.parametrize('unknown_calls', [0, 1, 5])
async def test_logging_waits_for_a_new_run(unknown_calls: int) -> None:
    """If a run becomes known within about two seconds, its points are stored after attempts with growing pauses."""
    metrics, store, pauses = _metrics(unknown_calls)
    points = [Point('loss', 0, 1.0)]
    await metrics.log(ALICE, 'ad-1', points)
    assert store.saved[0][0] == ('alice', 'ad-1', points)
    assert len(pauses) == unknown_calls
    assert pauses == sorted(pauses)


async def test_unknown_runs_are_refused() -> None:
    """Logging to an unknown run fails after less than two seconds; reading its metrics fails immediately."""
    metrics, store, pauses = _metrics(6)
    with pytest.raises(RunNotFound):
        await metrics.log(ALICE, 'ad-1', [Point('loss', 0, 1.0)])
    assert not store.saved
    assert 1 < sum(pauses) < 2
    reader, _, reader_pauses = _metrics(1)
    with pytest.raises(RunNotFound):
        await reader.get(ALICE, 'ad-1', MetricFilter())
    assert not reader_pauses


@pytest.mark.parametrize('is_log', [True, False], ids=['log', 'get'])
async def test_calls_of_a_tenant_run_one_at_a_time(*, is_log: bool) -> None:
    """One call of a tenant stores or reads points at a time; calls of other tenants do not wait for this call."""
    store, runs = _SlowStore(), _Runs(0)
    slow: Any = store
    known: Any = runs
    limits = PointLimits(per_run=9)
    metrics = Metrics(slow, known, clock=FakeClock(), limits_of=lambda _: limits, turns=TenantTurns())

    async def call(tenant_id: str) -> None:
        caller = Caller(tenant_id=tenant_id)
        if is_log:
            await metrics.log(caller, 'ad-1', [Point('loss', 0, 1.0)])
        else:
            await metrics.get(caller, 'ad-1', MetricFilter())

    calls = [asyncio.create_task(call(tenant_id)) for tenant_id in ('alice', 'alice', 'alice', 'bob')]
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.running == {'alice': 1, 'bob': 1}
    store.continued.set()
    await asyncio.gather(*calls)
    assert len(store.saved) == (4 if is_log else 0)


def _steps(kind: str, count: int) -> list[int]:
    numbers = random.Random(7)
    return {
        'ascending': list(range(count)),
        'descending': list(range(count, 0, -1)),
        'sparse': [1_000_000 * step for step in range(count)],
        'random': [numbers.randrange(MAX_STEP) for _ in range(count)],
        'repeated': [numbers.randrange(50) for _ in range(count)],
    }[kind]


@pytest.mark.parametrize('kind', ['ascending', 'descending', 'sparse', 'random', 'repeated'])
@pytest.mark.parametrize('batch', [1, 7, 1000])
def test_chunks_are_full_in_any_order_of_steps(kind: str, batch: int) -> None:
    """Points in any order are stored like a mapping, in chunks that are at least half full on average."""
    steps = _steps(kind, 3000)
    stored: dict[tuple[str, int], bytes] = {}
    expected: dict[int, float] = {}
    for begin in range(0, len(steps), batch):
        points = [Point('x', step, float(begin + index)) for index, step in enumerate(steps[begin : begin + batch])]
        expected.update({point.step: point.value for point in points})
        new = chunks_of(points, {'x': sorted(chunk for _, chunk in stored)}, 5)
        stored.update(merge_all(stored, new))
    chunks = [stored[key] for key in sorted(stored)]
    points = joined(chunks)
    assert points['step'].tolist() == sorted(expected)
    assert points['value'].tolist() == [expected[step] for step in sorted(expected)]
    assert np.all(points['time_us'] == 5)
    assert count_of(chunks) == len(expected)
    assert max(count_of([chunk]) for chunk in chunks) <= CHUNK_POINTS
    assert len(chunks) <= 1 + 2 * len(expected) / CHUNK_POINTS
