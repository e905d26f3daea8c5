"""The version store with fakes: waiting, one load per version, eviction of idle versions, and no wrong versions."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource
from twinkle.data_format import TensorData
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound, InvalidField, VersionNotFound
from twinkle_services.sampler.application.adapter_versions import AdapterVersions, Retention
from twinkle_services.sampler.domain.adapter import AdapterChoice
from twinkle_services.sampler.domain.errors import AdapterMisfit, VersionNotReady

ALICE = Caller(tenant_id='alice')
NOW = timedelta()
"""Waiting time of a request that does not wait."""


@pytest.fixture
def source() -> FakeWeightSource:
    """A source of weights, filled by each test."""
    return FakeWeightSource()


@pytest.fixture
def engine() -> FakeSamplerEngine:
    """The engine that versions are loaded into."""
    return FakeSamplerEngine()


@pytest.fixture
async def store(source: FakeWeightSource, engine: FakeSamplerEngine) -> AsyncIterator[AdapterVersions]:
    """A store with space for two versions."""
    created = AdapterVersions(engine, source, Retention(max_versions=2))
    yield created
    await created.close()
    assert source.followers == 0


async def version_of(store: AdapterVersions, adapter_id: str = 'ad-1', **choice) -> int:
    """Lease a version, release it and return its number."""
    async with store.lease(ALICE, AdapterChoice(adapter_id=adapter_id, **choice)) as version:
        return version.key.version


async def test_latest_is_the_newest_published_version(store, source):
    """The newest version is served as soon as it is loaded, over a single stream."""
    source.publish('alice', lora_weights(1))
    assert await version_of(store) == 1
    source.publish('alice', lora_weights(2))
    assert await version_of(store, at_least=2) == 2
    assert await version_of(store) == 2
    assert source.followers == 1


async def test_many_leases_load_a_version_once(store, source, engine):
    """Concurrent requests share one stream and one load."""
    source.publish('alice', lora_weights(1))
    assert await asyncio.gather(*(version_of(store) for _ in range(20))) == [1] * 20
    assert len(engine.loaded) == 1
    assert source.fetches == 0


async def test_evicted_version_is_fetched_again(store, source, engine):
    """A skipped version is fetched on request; an evicted version that the source no longer has is not found."""
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
    assert await version_of(store) == 3
    assert await version_of(store, exact=1) == 1
    assert await version_of(store, exact=2) == 2
    assert len(engine.loaded) == 2
    del source.versions['alice', 'ad-1'][3]
    with pytest.raises(VersionNotFound):
        await version_of(store, exact=3)


async def test_latest_is_never_an_older_resident_version(store, source):
    """If the newest version was evicted while an older version is in use, the newest version is fetched again."""
    source.publish('alice', lora_weights(1))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
        source.publish('alice', lora_weights(2))
        assert await version_of(store, at_least=2) == 2
        source.publish('alice', lora_weights(1, adapter_id='ad-2'))
        assert await version_of(store, 'ad-2') == 1
        assert await version_of(store) == 2


async def test_full_store_waits_for_a_lease_to_end(store, source):
    """If all versions are in use, a new version is loaded once a lease ends."""
    for name in ('a', 'b', 'c'):
        source.publish('alice', lora_weights(1, adapter_id=name))
    async with store.lease(ALICE, AdapterChoice(adapter_id='a')):
        async with store.lease(ALICE, AdapterChoice(adapter_id='b')):
            with pytest.raises(VersionNotReady):
                await version_of(store, 'c', wait=NOW)
            waiting = asyncio.create_task(version_of(store, 'c'))
        assert await waiting == 1


async def test_dropped_adapter_is_no_longer_followed(store, source):
    """Only adapters with resident versions are followed."""
    for name in ('a', 'b', 'c'):
        source.publish('alice', lora_weights(1, adapter_id=name))
        assert await version_of(store, name) == 1
    assert source.followers == 2


async def test_unknown_adapter_may_be_published_later(store, source):
    """An adapter that was not found is served once it is published."""
    with pytest.raises(AdapterNotFound):
        await version_of(store)
    source.publish('alice', lora_weights(1))
    assert await version_of(store) == 1


async def test_incompatible_adapter_is_refused(store, source):
    """An adapter of a different base model or with unsuitable tensors is refused at every request."""
    source.publish('alice', lora_weights(1, base_model='other'))
    source.publish('alice', lora_weights(1, adapter_id='odd', tensors={'x': TensorData('bool', (1,), b'\0')}))
    for _ in range(2):
        with pytest.raises(InvalidField):
            await version_of(store)
        with pytest.raises(AdapterMisfit):
            await version_of(store, 'odd')


async def test_unload_keeps_versions_in_use(store, source, engine):
    """A version in use stays loaded after `unload`, and is unloaded once it is idle."""
    source.publish('alice', lora_weights(1))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')) as version:
        await store.unload(ALICE, 'ad-1')
        assert version.key in engine.loaded
        assert source.followers == 0
    await store.unload(ALICE, 'ad-1')
    assert not engine.loaded
    with pytest.raises(AdapterNotFound):
        await store.unload(ALICE, 'ad-1')


async def test_cancelled_wait_does_not_count_as_a_use(store, source):
    """A cancelled wait does not count as use of a version."""
    source.publish('alice', lora_weights(1))
    waiting = asyncio.create_task(version_of(store, at_least=5))
    assert await version_of(store) == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [version.use_count for version in store.resident('alice')] == [0]


async def test_newest_without_capacity_does_not_satisfy_a_later_version(store, source):
    """A request for version 3 or newer does not get version 2, for which another request waited."""
    source.publish('alice', lora_weights(1))
    source.publish('alice', lora_weights(1, adapter_id='ad-2'))
    async with (
        store.lease(ALICE, AdapterChoice(adapter_id='ad-1')),
        store.lease(ALICE, AdapterChoice(adapter_id='ad-2')),
    ):
        source.publish('alice', lora_weights(2))
        with pytest.raises(VersionNotReady):
            await version_of(store, at_least=2, wait=timedelta(seconds=0.05))
        with pytest.raises(VersionNotReady):
            await version_of(store, at_least=3, wait=timedelta(seconds=0.05))
    assert await version_of(store, at_least=2) == 2


async def test_memory_is_bounded_in_bytes(source, engine):
    """Old versions are evicted by size, and an adapter larger than the memory is refused."""
    size = lora_weights(1).size_bytes
    store = AdapterVersions(engine, source, Retention(max_versions=8, max_bytes=2 * size))
    for number in range(1, 5):
        source.publish('alice', lora_weights(1, adapter_id=f'ad-{number}'))
        await version_of(store, f'ad-{number}')
        assert sum(version.size_bytes for version in store.all_resident()) <= 2 * size
    assert len(engine.loaded) == 2
    small = AdapterVersions(engine, source, Retention(max_bytes=size - 1))
    with pytest.raises(AdapterMisfit):
        await version_of(small)
    await store.close()
    await small.close()


async def test_adapters_are_followed_while_they_are_used(source, engine):
    """An idle adapter is no longer followed but stays resident, and is followed again when it is used."""
    store = AdapterVersions(engine, source, Retention(idle=timedelta(milliseconds=20)))
    source.publish('alice', lora_weights(1))
    assert await version_of(store) == 1
    await source.followed_by(0)
    source.publish('alice', lora_weights(2))
    assert [version.key.version for version in store.all_resident()] == [1]
    assert await version_of(store) == 2
    assert await version_of(store, exact=1) == 1
    assert source.fetches == 0
    await store.close()


async def test_few_adapters_are_followed_at_once(source, engine):
    """The least recently used adapter above the limit is not followed, unless a request waits for its versions."""
    store = AdapterVersions(engine, source, Retention(max_followers=2))
    for number in range(1, 5):
        source.publish('alice', lora_weights(1, adapter_id=f'ad-{number}'))
        assert await version_of(store, f'ad-{number}') == 1
        assert source.followers <= 2
    waiting = [asyncio.create_task(version_of(store, f'ad-{number}', at_least=2)) for number in (1, 2)]
    for number in (1, 2):
        await version_of(store, f'ad-{number}')
    with pytest.raises(VersionNotReady):
        await version_of(store, 'ad-3', at_least=2)
    for number, task in zip((1, 2), waiting, strict=True):
        source.publish('alice', lora_weights(2, adapter_id=f'ad-{number}'))
        assert await task == 2
    await store.close()


async def test_fetch_without_a_waiter_is_dropped(source, engine):
    """If a fetch has no waiting request because there was no capacity, its version can be leased later."""
    store = AdapterVersions(engine, source, Retention(max_versions=1))
    for version in (1, 2):
        source.publish('alice', lora_weights(version))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
        for _ in range(2):
            with pytest.raises(VersionNotReady):
                await version_of(store, exact=1, wait=timedelta(seconds=0.02))
        fetches = [task for task in asyncio.all_tasks() if task.get_name().startswith('fetch')]
        if fetches:
            async with asyncio.timeout(10):
                await asyncio.wait(fetches)
    assert await version_of(store, exact=1) == 1
    await store.close()


async def test_full_parameter_weights_are_refused_as_an_adapter(store, source):
    """Full-parameter weights are refused instead of being applied as an adapter."""
    source.publish('alice', replace(lora_weights(1), lora_config=None))
    with pytest.raises(AdapterMisfit):
        await version_of(store)


async def test_changes_of_resident_versions_reach_listeners(store, source):
    """A listener is called once after each change of the loaded versions."""
    seen: list[list[int]] = []
    store.on_change(lambda: seen.append([version.key.version for version in store.all_resident()]))
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
        await version_of(store, at_least=version)
    await store.unload(ALICE, 'ad-1')
    assert [sorted(versions) for versions in seen] == [[1], [1, 2], [2, 3], []]


@pytest.mark.timeout(20)
@pytest.mark.parametrize('order', [(1, 1, 2, 2, 3), (2, 1, 2, 1, 3), (3, 1, 1, 1, 2, 2, 3)])
async def test_versions_that_evict_each_other_are_all_served(source, engine, order):
    """Concurrent requests whose versions evict each other are all served."""
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
    store = AdapterVersions(engine, source, Retention(max_versions=1))
    assert await version_of(store) == 3
    assert await asyncio.gather(*(version_of(store, exact=version) for version in order)) == list(order)
    await store.close()
