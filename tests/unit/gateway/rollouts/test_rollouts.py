"""Statistics of rewards, ids of rollouts, and logging to runs that the gateway does not know yet."""

import asyncio
import math
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest

from twinkle_services.gateway.errors import RolloutNotFound, RunNotFound
from twinkle_services.gateway.rollouts.rollouts import Rollouts
from twinkle_services.gateway.rollouts.rules import (
    RewardStatistics,
    Rollout,
    RolloutFilter,
    RolloutSummary,
    parse_rollout_id,
    rollout_id_of,
    statistics_of,
)
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock

ALICE = Caller(tenant_id='alice')
GROUPS = {'a': [Rollout(RolloutSummary(index=0, content_bytes=0), b'')]}


@pytest.mark.parametrize('scale', [1.0, 1e-300, 1e140, 5e-324])
def test_statistics_equal_those_of_numpy(scale: float) -> None:
    """Statistics of rewards of any magnitude equal those of NumPy; rewards that are not finite are ignored."""
    numbers = random.Random(4)
    for count in range(1, 30):
        rewards = [numbers.choice([numbers.gauss(), 0.0, -1.0]) * scale for _ in range(count)]
        found = statistics_of([*rewards, None, math.nan, math.inf])
        assert (found.count, found.minimum, found.maximum) == (count, min(rewards), max(rewards))
        assert found.mean == pytest.approx(np.mean(rewards), rel=1e-9, abs=1e-12 * scale)
        # NumPy squares rewards and would overflow, so it computes with scaled rewards.
        expected = np.std(np.array(rewards) / scale) * scale
        assert found.standard_deviation == pytest.approx(expected, rel=1e-9, abs=1e-9 * scale)


@pytest.mark.parametrize('reward', [0.1, -0.0, 1.7e308, 5e-324])
def test_equal_rewards_have_no_deviation(reward: float) -> None:
    """Equal rewards have exactly their value as mean and the deviation 0; unknown rewards have no statistics."""
    for count in (1, 3, 7):
        assert statistics_of([reward] * count) == RewardStatistics(
            count=count, mean=reward, minimum=reward, maximum=reward
        )
    assert statistics_of([None, math.nan, -math.inf]) == RewardStatistics()


def test_large_rewards_do_not_overflow() -> None:
    """Rewards whose sum or square exceeds the range of floats have finite statistics."""
    found = statistics_of([1.7e308, -1.7e308, 1.7e308, 1.7e308])
    assert found.mean == pytest.approx(0.85e308)
    assert found.standard_deviation == pytest.approx(1.7e308 * math.sqrt(0.75))


@pytest.mark.parametrize('group_id', ['a', '0', 'a/b', '/', '//', 'x/0/y', '~'])
def test_ids_are_parsed_to_their_parts(group_id: str) -> None:
    """Formatting and parsing an id gives the same parts, for every group and position."""
    for step, index in ((0, 0), (2**53 - 1, 1023), (10, 9)):
        assert parse_rollout_id(rollout_id_of(step, group_id, index)) == ((step, group_id), index)


class _Runs:
    """Runs that are unknown for a number of calls."""

    def __init__(self, unknown_calls: int) -> None:
        self.unknown_calls = unknown_calls

    async def get(self, caller: Caller, run_id: str) -> None:
        self.unknown_calls -= 1
        if self.unknown_calls >= 0:
            raise RunNotFound(run_id)


class _Store:
    """Store without rollouts that records the arguments of its calls."""

    def __init__(self) -> None:
        self.saved: list[Any] = []

    async def save(self, *arguments: Any, **options: Any) -> int:
        self.saved.append((arguments, options))
        return 2

    async def get(self, *arguments: Any) -> None:
        return None


def _rollouts(unknown_calls: int) -> tuple[Rollouts, _Store, list[float]]:
    store, pauses = _Store(), list[float]()

    async def pause(seconds: float) -> None:
        pauses.append(seconds)

    runs: Any = _Runs(unknown_calls)
    stored: Any = store
    return Rollouts(stored, runs, clock=FakeClock(), max_bytes=9, pause=pause), store, pauses


@pytest.mark.parametrize('unknown_calls', [0, 1, 5])
async def test_logging_waits_for_a_new_run(unknown_calls: int) -> None:
    """If a run becomes known within about two seconds, its rollouts are stored after attempts with growing pauses."""
    rollouts, store, pauses = _rollouts(unknown_calls)
    assert await rollouts.log(ALICE, 'ad-1', 3, GROUPS) == 2
    assert store.saved == [((('alice', 'ad-1'), 3, GROUPS), {'moment': FakeClock().now(), 'max_bytes': 9})]
    assert len(pauses) == unknown_calls
    assert pauses == sorted(pauses)


async def test_unknown_runs_are_refused() -> None:
    """Logging to an unknown run fails after less than two seconds; reading its rollouts fails immediately."""
    rollouts, store, pauses = _rollouts(8)
    with pytest.raises(RunNotFound):
        await rollouts.log(ALICE, 'ad-1', 3, GROUPS)
    assert sum(pauses) < 2
    with pytest.raises(RunNotFound):
        await rollouts.list(ALICE, 'ad-1', RolloutFilter(), size=1, after=None)
    with pytest.raises(RunNotFound):
        await rollouts.get(ALICE, 'ad-1', '3/a/0')
    assert store.saved == []


@pytest.mark.parametrize('rollout_id', ['3/a/0', 'x'])
async def test_unknown_rollouts_are_refused(rollout_id: str) -> None:
    """A rollout that is not stored, and an id that cannot be parsed, are not found."""
    rollouts, _, _ = _rollouts(0)
    with pytest.raises(RolloutNotFound, match=rollout_id):
        await rollouts.get(ALICE, 'ad-1', rollout_id)


class _SlowStore:
    """Store whose calls wait for the test. It counts the running calls of each tenant."""

    def __init__(self) -> None:
        self.running: Counter[str] = Counter()
        self.continued = asyncio.Event()

    async def call(self, run: tuple[str, str], *arguments: Any, **options: Any) -> Any:
        del arguments, options
        self.running[run[0]] += 1
        await self.continued.wait()
        self.running[run[0]] -= 1

    save = list_page = get = call


@pytest.mark.parametrize('name', ['log', 'list', 'get'])
async def test_calls_of_a_tenant_run_one_at_a_time(name: str) -> None:
    """One call of a tenant stores or reads rollouts at a time; calls of other tenants do not wait for this call."""
    store, runs = _SlowStore(), _Runs(0)
    slow: Any = store
    known: Any = runs
    rollouts = Rollouts(slow, known, clock=FakeClock(), max_bytes=9)

    async def call(tenant_id: str) -> None:
        caller = Caller(tenant_id=tenant_id)
        if name == 'log':
            await rollouts.log(caller, 'ad-1', 3, GROUPS)
        elif name == 'list':
            await rollouts.list(caller, 'ad-1', RolloutFilter(), size=1, after=None)
        else:
            with pytest.raises(RolloutNotFound):
                await rollouts.get(caller, 'ad-1', '3/a/0')

    calls = [asyncio.create_task(call(tenant_id)) for tenant_id in ('alice', 'alice', 'alice', 'bob')]
    for _ in range(5):
        await asyncio.sleep(0)
    assert store.running == {'alice': 1, 'bob': 1}
    store.continued.set()
    await asyncio.gather(*calls)
