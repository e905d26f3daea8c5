"""Names of models that are not in the catalogue, and cancellation of a stream of several prompts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from datetime import UTC, datetime
from typing import Any

import pytest

from twinkle.api.checkpoint.v1 import checkpoint_pb2
from twinkle.api.model.v1 import adapter_pb2
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle_services.gateway.catalogue.runs import Runs
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.openai.models import ModelResolver, sample_all
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import (
    AdapterNotFound,
    BaseModelNotFound,
    CheckpointNotFound,
    DomainError,
    InvalidField,
    ServiceUnreachable,
)


class SilentSamplers:
    """Fake samplers that never respond."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.open_count = 0

    async def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        del caller, request
        self.open_count += 1
        self.called.set()
        try:
            await asyncio.Event().wait()
            yield wire.SampleResponse()
        finally:
            self.open_count -= 1


async def test_cancelled_reader_leaves_no_task() -> None:
    """When the reader of a merged stream is cancelled, the sampling of all prompts is cancelled and no task remains."""
    samplers: Any = SilentSamplers()
    before = asyncio.all_tasks()

    async def read() -> None:
        requests = [wire.SampleRequest(), wire.SampleRequest()]
        async with aclosing(sample_all(samplers, Caller(tenant_id='alice'), requests)) as responses:
            async for _ in responses:
                raise AssertionError('no response was expected')

    reading = asyncio.create_task(read())
    await samplers.called.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert samplers.open_count == 0


class FakeLookups:
    """Fake `GrpcLookups` of one adapter and one checkpoint; a test can make it fail."""

    def __init__(self) -> None:
        self.failure: DomainError | None = None

    async def adapter(self, adapter_id: str) -> adapter_pb2.Adapter:
        """Return the adapter 'new'."""
        if adapter_id != 'new':
            raise AdapterNotFound(adapter_id)
        return adapter_pb2.Adapter(base_model=self._base_model())

    async def checkpoint(self, checkpoint_path: str) -> checkpoint_pb2.Checkpoint:
        """Return the checkpoint 'public' of the run 'theirs'."""
        if checkpoint_path not in {'twinkle://theirs/weights/public.sampler', 'twinkle://theirs/weights/public'}:
            raise self.failure or CheckpointNotFound(checkpoint_path)
        return checkpoint_pb2.Checkpoint(base_model=self._base_model())

    def _base_model(self) -> str:
        if self.failure is not None:
            raise self.failure
        return 'tiny'


class FakeModels:
    """Fake samplers of the base model 'tiny'."""

    def base_model_names(self) -> list[str]:
        """Return the names of the base models."""
        return ['tiny']


ALICE = Caller(tenant_id='alice')
PUBLIC = 'tinker://theirs/sampler_weights/public'


def resolver_of(lookups: Any, database: Database) -> ModelResolver:
    """Return a resolver whose catalogue is in `database`."""
    models: Any = FakeModels()
    return ModelResolver(
        models, runs=Runs(SqlRunStore(database)), lookups=lookups, started_at=datetime(2026, 1, 1, tzinfo=UTC)
    )


@pytest.mark.parametrize('prefix', ['', 'tiny;'])
@pytest.mark.parametrize('name', ['new', 'new@3', PUBLIC, 'twinkle://theirs/weights/public'])
async def test_weights_outside_the_catalogue_are_found(database: Database, prefix: str, name: str) -> None:
    """A run that is not in the catalogue yet, and another tenant's public checkpoint, can be sampled."""
    found = await resolver_of(FakeLookups(), database).find(ALICE, prefix + name)
    assert (found.base_model, found.run) == ('tiny', None)
    assert found.adapter is not None
    assert found.adapter.adapter_id in {'', 'new'}
    assert found.adapter.checkpoint_path.partition('/weights/')[0] in {'', 'twinkle://theirs'}


@pytest.mark.parametrize('name', ['old', 'old@1', 'tinker://theirs/sampler_weights/private', 'tiny;old', 'tiny;'])
async def test_other_weights_are_unknown(database: Database, name: str) -> None:
    """Weights that the caller may not use are unknown, and their error contains only the requested name."""
    with pytest.raises(BaseModelNotFound) as caught:
        await resolver_of(FakeLookups(), database).find(ALICE, name)
    assert caught.value.metadata() == {'baseModel': name, 'known': 'tiny'}


async def test_public_weights_need_their_base_model(database: Database) -> None:
    """A public path after a different base model is refused."""
    with pytest.raises(InvalidField):
        await resolver_of(FakeLookups(), database).find(ALICE, f'large;{PUBLIC}')


async def test_unreachable_services_do_not_hide_models(database: Database) -> None:
    """An unreachable checkpoint service is an error for a path; an unreachable model service makes a name unknown."""
    lookups = FakeLookups()
    lookups.failure = ServiceUnreachable('checkpoint')
    with pytest.raises(ServiceUnreachable):
        await resolver_of(lookups, database).find(ALICE, PUBLIC)
    with pytest.raises(BaseModelNotFound):
        await resolver_of(lookups, database).find(ALICE, 'new')
    assert (await resolver_of(lookups, database).find(ALICE, 'tiny')).base_model == 'tiny'
