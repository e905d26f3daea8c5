"""The version store over fakes: waiting, loading once, leaving when unused, never another version."""

import asyncio
from collections.abc import AsyncIterator
from datetime import timedelta

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource
from services.kit.caller import Caller
from services.kit.errors import AdapterNotFound, InvalidField, VersionNotFound
from services.sampler.application.version_store import VersionStore
from services.sampler.domain.adapter import AdapterChoice
from services.sampler.domain.errors import AdapterMisfit, VersionNotReady
from twinkle.data_format import TensorData

ALICE = Caller(tenant_id='alice')
NOW = timedelta()


@pytest.fixture
def source() -> FakeWeightSource:
    """Weights, put in by each test."""
    return FakeWeightSource()


@pytest.fixture
def engine() -> FakeSamplerEngine:
    """What the weights are loaded into."""
    return FakeSamplerEngine()


@pytest.fixture
async def store(source: FakeWeightSource, engine: FakeSamplerEngine) -> AsyncIterator[VersionStore]:
    """A store of two versions."""
    made = VersionStore(engine, source, max_versions=2)
    yield made
    await made.close()
    assert source.followers == 0


async def version_of(store: VersionStore, adapter_id: str = 'ad-1', **choice) -> int:
    """Lease a version and let it go."""
    async with store.lease(ALICE, AdapterChoice(adapter_id=adapter_id, **choice)) as version:
        return version.key.version


async def test_latest_is_the_newest_that_came(store, source):
    """A later version is served once it is loaded, without asking again."""
    source.publish('alice', lora_weights(1))
    assert await version_of(store) == 1
    source.publish('alice', lora_weights(2))
    assert await version_of(store, at_least=2) == 2
    assert await version_of(store) == 2
    assert source.followers == 1


async def test_many_leases_load_a_version_once(store, source, engine):
    """Requests that come together share one stream and one load."""
    source.publish('alice', lora_weights(1))
    assert await asyncio.gather(*(version_of(store) for _ in range(20))) == [1] * 20
    assert len(engine.loaded) == 1
    assert source.fetches == 0


async def test_version_that_left_is_fetched_again(store, source, engine):
    """An exact version that was skipped or dropped comes back; one that is gone everywhere is not found."""
    for version in (1, 2, 3):
        source.publish('alice', lora_weights(version))
    assert await version_of(store) == 3
    assert await version_of(store, exact=1) == 1
    assert await version_of(store, exact=2) == 2
    assert len(engine.loaded) == 2
    del source.versions['alice', 'ad-1'][3]
    with pytest.raises(VersionNotFound):
        await version_of(store, exact=3)


async def test_latest_is_never_an_older_one_that_stayed(store, source):
    """If the newest version was dropped while an older one is in use, it is fetched, not replaced."""
    source.publish('alice', lora_weights(1))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
        source.publish('alice', lora_weights(2))
        assert await version_of(store, at_least=2) == 2
        source.publish('alice', lora_weights(1, adapter_id='ad-2'))
        assert await version_of(store, 'ad-2') == 1
        assert await version_of(store) == 2


async def test_full_store_waits_for_a_lease_to_end(store, source):
    """With every version in use a new one waits; it is loaded when one is let go."""
    for name in ('a', 'b', 'c'):
        source.publish('alice', lora_weights(1, adapter_id=name))
    async with store.lease(ALICE, AdapterChoice(adapter_id='a')):
        async with store.lease(ALICE, AdapterChoice(adapter_id='b')):
            with pytest.raises(VersionNotReady):
                await version_of(store, 'c', wait=NOW)
            waiting = asyncio.create_task(version_of(store, 'c'))
        assert await waiting == 1


async def test_dropped_adapter_is_followed_no_more(store, source):
    """Streams are open for adapters that are held, and no others."""
    for name in ('a', 'b', 'c'):
        source.publish('alice', lora_weights(1, adapter_id=name))
        assert await version_of(store, name) == 1
    assert source.followers == 2


async def test_unknown_adapter_may_be_published_later(store, source):
    """Not found is an answer, not a state."""
    with pytest.raises(AdapterNotFound):
        await version_of(store)
    source.publish('alice', lora_weights(1))
    assert await version_of(store) == 1


async def test_adapter_that_does_not_fit_is_told(store, source):
    """Another base model's adapter, and weights of another shape, are refused each time they are asked for."""
    source.publish('alice', lora_weights(1, base_model='other'))
    source.publish('alice', lora_weights(1, adapter_id='odd', tensors={'x': TensorData('bool', (1,), b'\0')}))
    for _ in range(2):
        with pytest.raises(InvalidField):
            await version_of(store)
        with pytest.raises(AdapterMisfit):
            await version_of(store, 'odd')


async def test_unload_keeps_what_is_in_use(store, source, engine):
    """A running request keeps its version; it leaves when room is needed."""
    source.publish('alice', lora_weights(1))
    async with store.lease(ALICE, AdapterChoice(adapter_id='ad-1')) as version:
        await store.unload(ALICE, 'ad-1')
        assert version.key in engine.loaded
        assert source.followers == 0
    await store.unload(ALICE, 'ad-1')
    assert not engine.loaded
    with pytest.raises(AdapterNotFound):
        await store.unload(ALICE, 'ad-1')


async def test_cancelled_wait_leaves_nothing_behind(store, source):
    """A caller that goes away while it waits holds no version."""
    source.publish('alice', lora_weights(1))
    waiting = asyncio.create_task(version_of(store, at_least=5))
    assert await version_of(store) == 1
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [version.use_count for version in store.resident('alice')] == [0]
