"""The model service removes unused adapters after it has saved their training in the checkpoint service."""

import asyncio
from collections.abc import Mapping
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.checkpoint_service import as_tenant, failure_of, serving
from fixtures.faulty_service import FaultyModel, Kill
from fixtures.model_service import RunningModel, draw_example, forward_backward, serving_model, serving_model_at
from twinkle.api.checkpoint.v1 import checkpoint_service_pb2
from twinkle.api.model.v1 import adapter_service_pb2, adapter_service_pb2_grpc, operation_pb2
from twinkle.data_format import TensorData
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import SystemClock
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.model.api.record_codec import ProtoRecordCodec
from twinkle_services.model.assembly import engine_name
from twinkle_services.model.backends.checkpoint_client import CheckpointClient
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.config import ModelConfig

ALICE = Caller(tenant_id='alice', scopes=frozenset({'train'}))


class ShiftedClock(SystemClock):
    """The system clock, ahead by a duration that a test changes."""

    lead = timedelta()

    def now(self):
        """Return the time of the system plus the lead."""
        return super().now() + self.lead


async def _train(running: RunningModel) -> str:
    """Train an adapter of a session by one step, and return the adapter's id."""
    adapter = await running.create(lora_config={'lora_rank': 4, 'seed': 3}, session_id='ses-1')
    verb = forward_backward([draw_example(), draw_example(9, seed=1)])
    await running.result(adapter.adapter_id, 1, forward_backward=verb)
    step = operation_pb2.ClipGradAndStep(max_grad_norm=1.0)
    await running.result(adapter.adapter_id, 2, clip_grad_and_step=step)
    return adapter.adapter_id


async def _end_session(running: RunningModel, adapter_id: str) -> None:
    with acting_for(ALICE):
        parked = await running.internal_adapters.ParkAdapter(
            adapter_service_pb2.ParkAdapterRequest(adapter_id=adapter_id)
        )
    assert parked.adapter.HasField('session_end_time')
    assert not parked.adapter.checkpoint_path


def _bytes_of(tensors: Mapping[str, TensorData], *, prefix: str = '') -> dict[str, bytes]:
    return {name: bytes(tensors[name].data) for name in tensors if name.startswith(prefix)}


async def test_removed_adapter_continues_bitwise_from_its_checkpoint(tiny_llama_dir, tmp_path):
    """An unused adapter is saved and removed; the weights and the optimizer in its checkpoint are bitwise unchanged."""
    clock = ShiftedClock()
    async with serving_model(tiny_llama_dir, tmp_path, clock=clock, parked_adapter_days=30) as running:
        adapter_id = await _train(running)
        trained = await running.backend.snapshot(adapter_id)
        assert trained is not None
        await running.result(adapter_id, 3, publish_version={'is_pinned': False})
        await _end_session(running, adapter_id)
        assert await running.verbs.expiry() == 0
        clock.lead = timedelta(days=31)
        assert await running.verbs.expiry() == 1
        assert list((tmp_path / 'journal' / 'snapshots').iterdir()) == []
        path = f'twinkle://{adapter_id}/weights/adapter-expired-1'
        failure = await failure_of(running.execute(adapter_id, 4, zero_grad={}))
        assert (failure.reason, failure.metadata['checkpointPath']) == ('ADAPTER_EXPIRED', path)
        loaded = await running.create(request_id='r2', checkpoint_path=path, is_optimizer_included=True)
        state = await running.backend.snapshot(loaded.adapter_id)
        assert state is not None
        assert _bytes_of(state.adapter) == _bytes_of(trained.adapter)
        optimizer = _bytes_of(trained.trainer, prefix='optimizer')
        assert optimizer
        assert _bytes_of(state.trainer, prefix='optimizer') == optimizer


async def _make_old(state_dir: Path, config: ModelConfig) -> None:
    """Change the times of the only adapter of a stopped service, as if it had been unused for a long time."""
    journal = await _open(state_dir, config)
    (known,) = await journal.adapters()
    old = known.adapter.create_time - timedelta(days=config.parked_adapter_days + 1)
    await journal.amend(replace(known.adapter, update_time=old, session_end_time=old))
    await journal.close()


async def _open(state_dir: Path, config: ModelConfig) -> SqliteJournal:
    codec = ProtoRecordCodec(vocabulary_size=1 << 20)
    return await SqliteJournal.open(state_dir / 'journal', codec=codec, engine=engine_name(config, dtype=config.dtype))


KILLS = [('park.taken', 'park.saved'), ('park.recorded', 'expiry.saved'), ('expiry.removed',)]
"""Failpoints of a sweep, in groups of at most two, because an adapter is kept after three crashes."""


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize('names', KILLS)
async def test_killed_sweeps_lose_nothing_and_are_completed(tiny_llama_dir, tmp_path, names):
    """The adapter is saved once and removed, although the service is killed at the steps of the sweep."""
    kills = [Kill(failpoint=name) for name in names]
    state_dir = tmp_path / 'faulty' / 'model'
    async with serving(tmp_path / 'checkpoint') as checkpoints:
        async with serving_model_at(checkpoints.address, tiny_llama_dir, state_dir) as running:
            adapter_id = await _train(running)
            trained = await running.backend.export_state(adapter_id, is_trainer_included=True)
            await _end_session(running, adapter_id)
        settings = {'base_model': str(tiny_llama_dir), 'checkpoint_address': checkpoints.address, 'thread_count': 1}
        config = ModelConfig(**settings)
        await _make_old(state_dir, config)
        service = FaultyModel(tmp_path / 'faulty', settings, kills)
        running_service = asyncio.create_task(service.run())
        channel = grpc.aio.insecure_channel(service.address)
        adapters = adapter_service_pb2_grpc.AdapterServiceStub(channel)
        try:
            request = adapter_service_pb2.GetAdapterRequest(adapter_id=adapter_id)
            is_found = True
            while service.deaths != kills or is_found:
                try:
                    await adapters.GetAdapter(request, wait_for_ready=True, timeout=60, metadata=as_tenant('alice'))
                except grpc.aio.AioRpcError as error:
                    is_found = error.code() is not grpc.StatusCode.NOT_FOUND
            # The service reports the adapter as removed before the removal is in the journal.
            await service.finish()
        finally:
            await channel.close()
            await service.stop()
            await running_service
        journal = await _open(state_dir, config)
        assert await journal.adapters() == []
        (expired,) = await journal.expired_adapters()
        await journal.close()
        listed = await checkpoints.checkpoints.ListCheckpoints(
            checkpoint_service_pb2.ListCheckpointsRequest(adapter_id=adapter_id), metadata=as_tenant('alice')
        )
        assert [item.path for item in listed.checkpoints] == [expired.checkpoint_path]
        with acting_for(ALICE):
            state = await CheckpointClient(checkpoints.channel).fetch(expired.checkpoint_path, is_trainer_included=True)
        assert _bytes_of(state.adapter) == _bytes_of(trained.adapter)
