"""The version store with cancelled callers: a started fetch or change completes, and later calls see its result."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import Unavailable, VersionNotFound
from twinkle_services.sampler.application.adapter_versions import AdapterVersions
from twinkle_services.sampler.application.fetches import MAX_UNAWAITED
from twinkle_services.sampler.application.versions_protocol import Retention
from twinkle_services.sampler.domain.adapter import (
    AdapterChoice,
    AdapterKey,
    AdapterWeights,
    CheckpointFacts,
    VersionKey,
)
from twinkle_services.sampler.domain.errors import VersionNotReady

ALICE = Caller(tenant_id='alice')
NOW = timedelta()
"""Maximum wait of a request that does not wait."""
_MAX_ITERATIONS = 200
"""Iterations of the event loop after which all fakes have finished."""


class GatedEngine(FakeSamplerEngine):
    """An engine whose unloading waits for a gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.unloading = asyncio.Event()

    async def unload_adapter(self, key: VersionKey) -> None:
        """Wait for the gate, then unload."""
        self.unloading.set()
        await self.gate.wait()
        await super().unload_adapter(key)


class SlowSource(FakeWeightSource):
    """A source that returns versions and checkpoints only after some iterations of the event loop."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()

    async def fetch(self, caller: Caller, adapter_id: str, version: int) -> AdapterWeights:
        """Fetch once the gate is open, after at least one iteration of the event loop."""
        await asyncio.sleep(0)
        await self.gate.wait()
        return await super().fetch(caller, adapter_id, version)

    async def find_checkpoint(self, caller: Caller, path: str) -> CheckpointFacts:
        """Look up the checkpoint after one iteration of the event loop."""
        await asyncio.sleep(0)
        return await super().find_checkpoint(caller, path)


@pytest.fixture
def source() -> SlowSource:
    """A source of weights, filled by each test."""
    return SlowSource()


@pytest.fixture
def engine() -> GatedEngine:
    """The engine that versions are loaded into."""
    return GatedEngine()


@pytest.fixture
async def store(source: SlowSource, engine: GatedEngine) -> AsyncIterator[AdapterVersions]:
    """A store with space for two versions."""
    created = AdapterVersions(engine, source, Retention(max_versions=2))
    yield created
    await created.close()
    assert source.followers == 0


async def version_of(store: AdapterVersions, adapter_id: str = 'ad-1', **choice) -> int:
    """Lease a version, release it and return its number."""
    async with store.lease(ALICE, AdapterChoice(adapter_id=adapter_id, **choice)) as version:
        return version.key.version


async def retry_version(store: AdapterVersions, **choice) -> int:
    """Request a lease again after each retryable refusal, at least once, until it is granted; return its version."""
    refusals: list[VersionNotReady] = []
    for _ in range(_MAX_ITERATIONS):
        try:
            version = await version_of(store, wait=NOW, **choice)
        except VersionNotReady as refusal:
            refusals.append(refusal)
            await asyncio.sleep(0)
            continue
        assert refusals
        assert all(isinstance(refusal, Unavailable) and refusal.retry_after for refusal in refusals)
        assert {refusal.reason for refusal in refusals} == {'VERSION_NOT_READY'}
        return version
    raise AssertionError('the version is never ready')


async def test_call_that_does_not_wait_finds_an_evicted_version_later(store, source):
    """A fetch continues after the non-waiting call that started it, and a later call finds the version."""
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
        assert await version_of(store, at_least=version) == version
    assert [resident_version.key.version for resident_version in store.resident('alice')] == [2, 3]
    assert await retry_version(store, exact=1) == 1
    assert source.fetches == 1


async def test_call_that_does_not_wait_finds_a_checkpoint_later(store, source):
    """A non-waiting call still looks up the checkpoint, and a later call finds it."""
    path = 'twinkle://run/weights/step-1'
    facts = CheckpointFacts(path=path, digest='d', step_count=7)
    source.checkpoints['alice', path] = (facts, lora_weights(0))
    assert await retry_version(store, adapter_id='', checkpoint_path=path) == 7


async def test_call_that_does_not_wait_gets_the_error_later(store, source):
    """If a fetch fails while no call waits for it, a later call gets the error."""
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
    assert await version_of(store) == 3
    del source.versions['alice', 'ad-1'][1]
    with pytest.raises(VersionNotFound):
        await retry_version(store, exact=1)


async def test_fetches_without_a_waiter_are_bounded(store, source):
    """The number of fetches without a waiter is bounded."""
    for version in range(1, 40):
        source.publish('alice', lora_weights(version))
    assert await version_of(store) == 39
    source.gate.clear()
    for version in range(1, 30):
        with pytest.raises(VersionNotReady):
            await version_of(store, exact=version, wait=NOW)
    for _ in range(_MAX_ITERATIONS):
        await asyncio.sleep(0)
    fetches = [task for task in asyncio.all_tasks() if task.get_name().startswith('fetch')]
    assert len(fetches) == MAX_UNAWAITED
    source.gate.set()
    assert await version_of(store, exact=1) == 1


@pytest.mark.parametrize('cancelled', ['follower', 'unload'])
async def test_cancelled_change_leaves_engine_and_store_consistent(engine, source, cancelled):
    """A change that is cancelled between two evictions completes, so that engine and store stay consistent."""
    size = lora_weights(1).size_bytes
    store = AdapterVersions(engine, source, Retention(max_bytes=2 * size))
    for name in ('a', 'b'):
        source.publish('alice', lora_weights(1, adapter_id=name))
        assert await version_of(store, name) == 1
    engine.gate.clear()
    engine.unloading.clear()
    if cancelled == 'unload':
        source.publish('alice', lora_weights(2, adapter_id='a'))
        running = asyncio.create_task(store.unload(ALICE, 'a'))
    else:
        # Two versions must be evicted for one of twice the size.
        source.publish('alice', large_weights('c', 2 * size))
        running = asyncio.create_task(version_of(store, 'c'))
    await engine.unloading.wait()
    running.cancel()
    await asyncio.wait([running])
    await store.followers.stop(AdapterKey('alice', 'c'))
    engine.gate.set()
    await store.close()
    assert set(engine.loaded) == {version.key for version in store.all_resident()}


def large_weights(adapter_id: str, size_bytes: int) -> AdapterWeights:
    """Return weights with a given nominal size."""
    return replace(lora_weights(1, adapter_id=adapter_id), size_bytes=size_bytes)


async def test_unloaded_version_in_use_is_unloaded_after_its_last_lease(store, source, engine):
    """A version that is unloaded during two requests is kept until both have ended, and can be fetched again."""
    source.publish('alice', lora_weights(1))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
        async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
            await store.unload(ALICE, 'ad-1')
        await asyncio.sleep(0)
        assert [version.key.version for version in store.resident('alice')] == [1]
        assert not engine.unloading.is_set()
    await engine.unloading.wait()
    assert store.resident('alice') == []
    assert await version_of(store) == 1
    assert [version.key.version for version in store.resident('alice')] == [1]
