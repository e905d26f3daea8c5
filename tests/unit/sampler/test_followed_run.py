"""A sampler of one run over fakes: what keeps the door shut, for how long, and who is told what."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource
from services.kit.caller import Caller
from services.kit.errors import VersionNotFound
from services.sampler.application.followed_run import FollowedRun
from services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights
from services.sampler.domain.errors import AdapterMisfit, EngineInUse, VersionNotReady
from services.sampler.ports import WeightUpdate
from twinkle.data_format import TensorData

ALICE = Caller(tenant_id='alice')
RUN = AdapterKey('alice', 'full')
PATIENCE = timedelta(milliseconds=20)
_LIMIT_SECONDS = 10
_SOME_TURNS = 20
"""Of the event loop, in which whoever heard of something has done what it does then."""


class SlowEngine(FakeSamplerEngine):
    """Replaces its base model only when a test lets it, and refuses what a real one refuses."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.begun: list[int] = []
        self.refusals = 0
        self.under_way = 0
        self.began = asyncio.Event()

    async def replace_base(self, weights: AdapterWeights) -> None:
        """Replace once the gate is open."""
        self.begun.append(weights.version)
        self.began.set()
        if self.refusals:
            self.refusals -= 1
            raise EngineInUse
        assert not self.under_way, 'two replacements at once'
        self.under_way += 1
        await self.gate.wait()
        await super().replace_base(weights)
        self.under_way -= 1


def whole(version: int) -> AdapterWeights:
    """Return a whole model, as far as fakes look."""
    weights = lora_weights(version, adapter_id='full')
    return AdapterWeights(
        adapter_id='full',
        version=version,
        base_model=weights.base_model,
        lora_config=None,
        tensors={'model.embed_tokens.weight': TensorData('float32', (1,), bytes(4))},
        size_bytes=weights.size_bytes,
        digest=weights.digest,
    )


async def version_of(run: FollowedRun, **choice) -> int:
    """Lease a version and let it go."""
    async with run.lease(ALICE, AdapterChoice(adapter_id='full', **choice)) as version:
        return version.key.version


@pytest.fixture
def engine() -> SlowEngine:
    """What the weights are put into."""
    return SlowEngine()


@pytest.fixture
async def source() -> FakeWeightSource:
    """With one version."""
    made = FakeWeightSource()
    made.publish('alice', whole(1))
    return made


@pytest.fixture
async def run(engine: SlowEngine, source: FakeWeightSource) -> AsyncGenerator[FollowedRun, None]:
    """Started."""
    made = FollowedRun(engine, source, RUN, patience=PATIENCE)
    made.start()
    async with asyncio.timeout(_LIMIT_SECONDS):
        yield made
    engine.gate.set()
    await made.close()


async def test_replacement_that_outlasts_the_patience_is_one_and_shuts_the_door(run, engine, source):
    """However long the engine takes, nothing is answered meanwhile, and nothing is begun beside it."""
    assert await version_of(run) == 1
    engine.gate.clear()
    engine.began.clear()
    source.publish('alice', whole(2))
    await engine.began.wait()
    for _ in range(10):
        with pytest.raises(VersionNotReady):
            await version_of(run, wait=PATIENCE)
    assert engine.begun == [1, 2]
    engine.gate.set()
    assert await version_of(run) == 2
    assert engine.begun == [1, 2]


async def test_long_request_lets_others_in_for_as_long_as_it_kept_them_out(engine, source):
    """Once the patience has run out requests come in on the old version; the end of one does not shut the door."""
    run = FollowedRun(engine, source, RUN, patience=timedelta(seconds=1))
    run.start()
    async with run.lease(ALICE, AdapterChoice(adapter_id='full')):
        source.publish('alice', whole(2))
        for _ in range(_SOME_TURNS):
            await asyncio.sleep(0)
        with pytest.raises(VersionNotReady):
            await version_of(run, wait=timedelta())
        assert await version_of(run) == 1
        for _ in range(_SOME_TURNS):
            await asyncio.sleep(0)
            assert await version_of(run, wait=timedelta()) == 1
    assert await version_of(run, at_least=2) == 2
    await run.close()


async def test_engine_that_is_in_use_is_asked_again(run, engine, source):
    """It may sleep: the old version serves, and the new one comes once it can."""
    assert await version_of(run) == 1
    engine.refusals = 3
    source.publish('alice', whole(2))
    assert await version_of(run, at_least=2) == 2
    assert engine.begun == [1, 2, 2, 2, 2]


async def test_version_after_one_that_cannot_be_served_is_waited_for(run, source):
    """Who wants the bad version is told what is wrong with it; who wants a later one waits, and gets it."""
    assert await version_of(run) == 1
    source.publish('alice', lora_weights(3, adapter_id='full'))
    with pytest.raises(AdapterMisfit):
        await version_of(run, at_least=2)
    with pytest.raises(VersionNotFound):
        await version_of(run, exact=2)
    with pytest.raises(VersionNotReady):
        await version_of(run, at_least=4, wait=PATIENCE)
    waiting = asyncio.create_task(version_of(run, at_least=4))
    source.publish('alice', whole(4))
    assert await waiting == 4


async def test_whatever_ends_the_stream_the_run_is_followed_again(engine):
    """A stream that ends without a word, and one that breaks unforeseen, cost a pause and nothing else."""

    class Breaking(FakeWeightSource):
        endings: int = 0

        async def follow(
            self, caller: Caller, adapter_id: str, held: AdapterWeights | None
        ) -> AsyncGenerator[WeightUpdate, None]:
            self.endings += 1
            if self.endings == 1:
                return
            if self.endings == 2:
                raise RuntimeError('unforeseen')
            async for update in super().follow(caller, adapter_id, held):
                yield update

    source = Breaking()
    source.publish('alice', whole(1))
    run = FollowedRun(engine, source, RUN)
    run.start()
    async with asyncio.timeout(_LIMIT_SECONDS):
        assert await version_of(run) == 1
    await run.close()
    assert source.endings == 3
