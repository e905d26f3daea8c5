"""Contract tests of weight stores, for the checkpoint service's client and the fake."""

from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import pytest

from fixtures import checkpoint_service
from fixtures.fake_store import FakeStore
from twinkle.data_format import LoraConfig, TensorData
from twinkle_services.kit.errors import Code, DomainError, InvalidField
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Segments
from twinkle_services.model.backends.checkpoint_client import CheckpointClient
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.operation import Save
from twinkle_services.model.ports import WeightStore

NAME = 'base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight'
STATE = AdapterState(
    lora_config=LoraConfig(r=2, seed=1, target_modules=('q_proj',)),
    adapter={NAME: TensorData.from_numpy(np.arange(8, dtype=np.float32).reshape(2, 4))},
    trainer={'trainer_state': TensorData.from_numpy(np.arange(3, dtype=np.uint8))},
    step_count=7,
)


@pytest.fixture(params=['fake', 'checkpoint-service', 'shared-memory'])
async def store(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[WeightStore]:
    """Each implementation, which acts on behalf of a tenant."""
    with acting_for(checkpoint_service.ALICE):
        if request.param == 'fake':
            yield FakeStore()
            return
        async with checkpoint_service.serving(tmp_path) as service:
            is_shared = request.param == 'shared-memory'
            segments = Segments(tmp_path / 'memory') if is_shared else None
            yield CheckpointClient(service.channel, segments=segments)


async def test_saved_state_is_returned_unchanged(store):
    """Weights, configuration, trainer's state and step count are returned unchanged."""
    save = Save(name='one', is_optimizer_included=True)
    saved = await store.save('ad-1', STATE, base_model='org/tiny', save=save, request_id='ad-1:1:f')
    assert saved.checkpoint_path == 'twinkle://ad-1/weights/one'
    assert saved.size_bytes > 0
    fetched = await store.fetch(saved.checkpoint_path, is_trainer_included=True)
    assert (fetched.lora_config, fetched.step_count) == (STATE.lora_config, 7)
    assert fetched.adapter[NAME].to_numpy().tolist() == STATE.adapter[NAME].to_numpy().tolist()
    assert bytes(fetched.trainer['trainer_state'].data) == b'\x00\x01\x02'


async def test_a_checkpoint_of_another_base_model_is_refused_by_name(tmp_path):
    """A checkpoint of another base model is refused, even if the shapes match."""
    async with checkpoint_service.serving(tmp_path) as service:
        with acting_for(checkpoint_service.ALICE):
            saving = CheckpointClient(service.channel, base_model='org/tiny')
            saved = await saving.save(
                'ad-1', STATE, base_model='org/tiny', save=Save(name='one'), request_id='ad-1:1:f'
            )
            await saving.fetch(saved.checkpoint_path, is_trainer_included=False)
            with pytest.raises(InvalidField) as refusal:
                await CheckpointClient(service.channel, base_model='org/other').fetch(
                    saved.checkpoint_path, is_trainer_included=False
                )
            assert refusal.value.field == 'checkpoint_path'


async def test_an_absent_checkpoint_is_not_found(store):
    """Loading an unknown checkpoint raises CheckpointNotFound."""
    with pytest.raises(DomainError) as refusal:
        await store.fetch('twinkle://ad-1/weights/none', is_trainer_included=False)
    assert (refusal.value.code, refusal.value.reason) == (Code.NOT_FOUND, 'CHECKPOINT_NOT_FOUND')


async def test_only_the_same_request_can_repeat_a_save(store):
    """A repeated save returns the same result; another request is refused because the name is in use."""
    save = Save(name='two')
    weights = replace(STATE, trainer={})
    first, second = [
        await store.save('ad-1', weights, base_model='org/tiny', save=save, request_id='ad-1:1:f') for _ in range(2)
    ]
    assert first == second
    with pytest.raises(DomainError) as refusal:
        await store.save('ad-1', weights, base_model='org/tiny', save=save, request_id='ad-1:2:f')
    assert refusal.value.code is Code.ALREADY_EXISTS


async def test_publish_is_idempotent(store):
    """Publishing the same version again, with the same state, returns the same result."""
    weights = replace(STATE, trainer={})
    results = [
        await store.publish_version('ad-1', weights, base_model='org/tiny', version=1, is_pinned=False)
        for _ in range(2)
    ]
    assert results[0] == results[1]
    assert results[0].version == 1


async def test_only_an_existing_checkpoint_counts_as_stored(store):
    """An existing checkpoint counts as stored; an unknown checkpoint does not."""
    saved = await store.save('ad-1', STATE, base_model='org/tiny', save=Save(name='kept'), request_id='ad-1:2:f')
    assert await store.has_lasting_checkpoint(saved.checkpoint_path)
    assert not await store.has_lasting_checkpoint('twinkle://ad-1/weights/none')


async def test_a_damaged_or_expiring_checkpoint_does_not_count_as_stored(tmp_path):
    """A checkpoint with an expiry time, or with changed files, does not count as stored."""
    async with checkpoint_service.serving(tmp_path) as service:
        with acting_for(checkpoint_service.ALICE):
            client = CheckpointClient(service.channel)
            for name, ttl in (('kept', None), ('expiring', timedelta(days=1))):
                save = Save(name=name, ttl=ttl)
                await client.save('ad-1', STATE, base_model='org/tiny', save=save, request_id=f'ad-1:1:{name}')
            assert await client.has_lasting_checkpoint('twinkle://ad-1/weights/kept')
            assert not await client.has_lasting_checkpoint('twinkle://ad-1/weights/expiring')
            for path in tmp_path.rglob('adapter_model.safetensors'):
                path.write_bytes(path.read_bytes()[:-1] + b'x')
            assert not await client.has_lasting_checkpoint('twinkle://ad-1/weights/kept')
