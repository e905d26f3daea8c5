"""Tests of a sampler that follows one full-parameter run, with a fake engine and a fake weight source.

The tests cover the waiting times of requests, and the versions that requests get.
"""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource
from twinkle.data_format import TensorData
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import VersionNotFound
from twinkle_services.sampler.application.full_parameter_run import FullParameterRun
from twinkle_services.sampler.domain.adapter import AdapterChoice, AdapterKey, AdapterWeights
from twinkle_services.sampler.domain.errors import AdapterMisfit, EngineInUse, VersionNotReady
from twinkle_services.sampler.ports import WeightUpdate

ALICE = Caller(tenant_id='alice')
RUN = AdapterKey('alice', 'full')
PATIENCE = timedelta(milliseconds=20)
"""Maximum time for which a pending replacement delays requests."""
_LIMIT_SECONDS = 10
"""Maximum duration of a test."""
_SOME_ITERATIONS = 20
"""Iterations of the event loop after which all notified tasks have run."""


class SlowEngine(FakeSamplerEngine):
    """An engine that replaces its weights only once `gate` is set, and refuses the next `refusals` replacements."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = asyncio.Event()
        self.gate.set()
        self.attempts: list[int] = []
        self.refusals = 0
        self.running_count = 0
        self.replacement_started = asyncio.Event()

    async def replace_base(self, weights: AdapterWeights) -> None:
        """Replace the base weights once `gate` is set."""
        self.attempts.append(weights.version)
        self.replacement_started.set()
        if self.refusals:
            self.refusals -= 1
            raise EngineInUse
        assert not self.running_count, 'two replacements at once'
        self.running_count += 1
        await self.gate.wait()
        await super().replace_base(weights)
        self.running_count -= 1


def full_weights(version: int) -> AdapterWeights:
    """Return full-parameter weights that the fake engine accepts."""
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


async def version_of(run: FullParameterRun, **choice) -> int:
    """Lease a version, release it and return its number."""
    async with run.lease(ALICE, AdapterChoice(adapter_id='full', **choice)) as version:
        return version.key.version


@pytest.fixture
def engine() -> SlowEngine:
    """The engine whose base weights are replaced."""
    return SlowEngine()


@pytest.fixture
async def source() -> FakeWeightSource:
    """A source with one version."""
    created = FakeWeightSource()
    created.publish('alice', full_weights(1))
    return created


@pytest.fixture
async def run(engine: SlowEngine, source: FakeWeightSource) -> AsyncGenerator[FullParameterRun, None]:
    """A run that is being followed."""
    created = FullParameterRun(engine, source, RUN, patience=PATIENCE)
    created.start()
    async with asyncio.timeout(_LIMIT_SECONDS):
        yield created
    engine.gate.set()
    await created.close()


async def test_slow_replacement_runs_once_and_delays_requests(run, engine, source):
    """No request is served and no second replacement starts during a slow replacement."""
    assert await version_of(run) == 1
    engine.gate.clear()
    engine.replacement_started.clear()
    source.publish('alice', full_weights(2))
    await engine.replacement_started.wait()
    for _ in range(10):
        with pytest.raises(VersionNotReady):
            await version_of(run, wait=PATIENCE)
    assert engine.attempts == [1, 2]
    engine.gate.set()
    assert await version_of(run) == 2
    assert engine.attempts == [1, 2]


async def test_long_request_delays_others_for_at_most_the_patience(engine, source):
    """Requests wait for at most `patience`, even while other requests end, and then get the old version."""
    run = FullParameterRun(engine, source, RUN, patience=timedelta(seconds=1))
    run.start()
    async with run.lease(ALICE, AdapterChoice(adapter_id='full')):
        source.publish('alice', full_weights(2))
        for _ in range(_SOME_ITERATIONS):
            await asyncio.sleep(0)
        with pytest.raises(VersionNotReady):
            await version_of(run, wait=timedelta())
        assert await version_of(run) == 1
        for _ in range(_SOME_ITERATIONS):
            await asyncio.sleep(0)
            assert await version_of(run, wait=timedelta()) == 1
    assert await version_of(run, at_least=2) == 2
    await run.close()


async def test_refused_replacement_is_retried(run, engine, source):
    """A replacement that the engine refuses is retried until it succeeds."""
    assert await version_of(run) == 1
    engine.refusals = 3
    source.publish('alice', full_weights(2))
    assert await version_of(run, at_least=2) == 2
    assert engine.attempts == [1, 2, 2, 2, 2]


async def test_request_waits_for_the_version_after_an_unusable_one(run, source):
    """A request for an unusable version gets the version's error; a request for a later version waits."""
    assert await version_of(run) == 1
    source.publish('alice', lora_weights(3, adapter_id='full'))
    with pytest.raises(AdapterMisfit):
        await version_of(run, at_least=2)
    with pytest.raises(VersionNotFound):
        await version_of(run, exact=2)
    with pytest.raises(VersionNotReady):
        await version_of(run, at_least=4, wait=PATIENCE)
    waiting = asyncio.create_task(version_of(run, at_least=4))
    source.publish('alice', full_weights(4))
    assert await waiting == 4


async def test_run_is_followed_again_after_its_stream_ends(engine):
    """The run is followed again after a stream ends, and after a stream fails unexpectedly."""

    class FailingSource(FakeWeightSource):
        failures: int = 0

        async def follow(
            self, caller: Caller, adapter_id: str, held: AdapterWeights | None
        ) -> AsyncGenerator[WeightUpdate, None]:
            self.failures += 1
            if self.failures == 1:
                return
            if self.failures == 2:
                raise RuntimeError('unforeseen')
            async for update in super().follow(caller, adapter_id, held):
                yield update

    source = FailingSource()
    source.publish('alice', full_weights(1))
    run = FullParameterRun(engine, source, RUN)
    run.start()
    async with asyncio.timeout(_LIMIT_SECONDS):
        assert await version_of(run) == 1
    await run.close()
    assert source.failures == 3
