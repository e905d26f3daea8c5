"""No acknowledged state is lost if the service is killed or stopped during publishes, saves and subscriptions."""

import asyncio
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.checkpoint_service import ALICE, ServiceProcess, failure_of, make_state, publish_frames, until
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2, weight_stream_service_pb2_grpc, weights_pb2
from twinkle.checkpoint_engine import PackedState, read_peft_folder
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights.wire import WeightClient

SEEDS = 24
STATE_BYTES = 1 << 20


@pytest.mark.timeout(240)
@pytest.mark.slow
async def test_kill_at_any_byte_never_mixes_or_loses_a_state(tmp_path: Path) -> None:
    """The service, restarted after each kill, serves the complete old state or the complete new state."""
    process = await ServiceProcess.start(tmp_path)
    newest, saved = make_state(0), make_state(1)
    await _commit(process, newest, version=1)
    await _commit(process, saved, checkpoint=True)
    try:
        for seed in range(SEEDS):
            version = seed + 2
            state = make_state(100 + seed, size_bytes=STATE_BYTES, is_trainer_included=seed % 2 == 1)
            await _kill_while_sending(process, state, version=version, checkpoint=seed % 2 == 1, seed=seed)
            process = await ServiceProcess.start(tmp_path)
            await until(lambda: _has_no_partial_files(tmp_path))
            newest, saved = await _check(process, state, newest=newest, saved=saved)
            # A repeated send has the same outcome, whether or not the state was committed before the kill.
            await _commit(process, state, version=version, checkpoint=seed % 2 == 1)
            newest, saved = (newest, state) if seed % 2 == 1 else (state, saved)
            await _check(process, state, newest=newest, saved=saved)
    finally:
        await process.kill()


async def test_follower_continues_after_a_kill(tmp_path: Path) -> None:
    """A follower receives the version that is published after the service was killed and restarted."""
    process = await ServiceProcess.start(tmp_path)
    port = process.address.rpartition(':')[2]
    channel = open_channel(process.address)
    try:
        with acting_for(ALICE):
            client = WeightClient(channel)
            await client.publish_version('ad-1', make_state(1), version=1)
            events = client.follow('ad-1')
            received = [await anext(events), await anext(events)]
            await process.kill()
            process = await ServiceProcess.start(tmp_path, f'listen=127.0.0.1:{port}')
            await client.publish_version('ad-1', make_state(2), version=2)
            while len(received) < 3 or getattr(received[-1], 'state', None) != make_state(2):
                received.append(await anext(events))
            await events.aclose()
    finally:
        await channel.close()
        await process.kill()


async def test_shutdown_does_not_wait_for_followers(tmp_path: Path) -> None:
    """Shutdown closes open subscriptions with a retryable error instead of waiting for them."""
    process = await ServiceProcess.start(tmp_path, 'drain_seconds=1000')
    await _commit(process, make_state(1), version=1)
    async with _channel(process) as channel:
        with acting_for(ALICE):
            stub = weight_stream_service_pb2_grpc.WeightStreamServiceStub(channel)
            call = stub.Subscribe(weight_stream_service_pb2.SubscribeRequest(adapter_id='ad-1', held_version=1))
            assert (await call.read()).is_synced
            exit_status = asyncio.ensure_future(process.stop())
            failure = await failure_of(call)
    assert (failure.code, failure.reason) == ('UNAVAILABLE', 'DRAINING')
    assert await exit_status == 0


async def _kill_while_sending(
    process: ServiceProcess, state: PackedState, *, version: int, checkpoint: bool, seed: int
) -> None:
    """Kill the service at a random point of a publish or a save."""
    rng = random.Random(seed)
    frames = publish_frames(
        state, version=version, checkpoint=_target() if checkpoint else None, chunk_bytes=rng.randrange(1000, 200_000)
    )
    kill_at = rng.choice([rng.randrange(len(frames)), len(frames) - 1])

    async def send() -> AsyncIterator[Any]:
        for index, frame in enumerate(frames):
            yield frame
            if index == kill_at:
                for _ in range(rng.randrange(200)):
                    await asyncio.sleep(0)
                await process.kill()

    async with _channel(process) as channel:
        with acting_for(ALICE):
            stub = weight_stream_service_pb2_grpc.WeightStreamServiceStub(channel)
            call = stub.Publish(send())
            # grpc.aio reports a write to a connection that has just broken as INTERNAL.
            assert await call.code() in {grpc.StatusCode.OK, grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.INTERNAL}
    await process.kill()


async def _commit(process: ServiceProcess, state: PackedState, *, version: int = 0, checkpoint: bool = False) -> None:
    async with _channel(process) as channel:
        with acting_for(ALICE):
            if checkpoint:
                await WeightClient(channel).save_checkpoint('ad-1', state, _target())
            else:
                await WeightClient(channel).publish_version('ad-1', state, version=version)


async def _check(
    process: ServiceProcess, sent: PackedState, *, newest: PackedState, saved: PackedState
) -> tuple[PackedState, PackedState]:
    """Return the newest version and the checkpoint; each must be either the old state or the sent state."""
    async with _channel(process) as channel:
        with acting_for(ALICE):
            client = WeightClient(channel)
            version = (await client.fetch_version('ad-1')).state
            checkpoint = (await client.fetch_checkpoint('ad-1/weights/final')).state
    assert version in (newest, sent)
    assert checkpoint in (saved, sent)
    return version, checkpoint


def _has_no_partial_files(state_dir: Path) -> bool:
    """Return whether every folder is referenced by a record and can be loaded.

    The result can be False immediately after a start: versions in shared memory may not be on disk yet.
    """
    slots = [path for path in (state_dir / 'checkpoint' / 'states').glob('*/*/*/*') if path.is_dir()]
    return all(_is_committed(slot) for slot in slots)


def _is_committed(slot: Path) -> bool:
    folders = [path for path in slot.iterdir() if path.is_dir()]
    if len(folders) != 1 or [path.name for path in slot.iterdir() if path.is_file()] != ['record.json']:
        return False
    is_referenced = folders[0].name in (slot / 'record.json').read_text()
    return is_referenced and bool(read_peft_folder(folders[0])[0])


def _target() -> weights_pb2.CheckpointTarget:
    return weights_pb2.CheckpointTarget(name='final', is_overwrite_allowed=True)


def _channel(process: ServiceProcess) -> grpc.aio.Channel:
    return open_channel(process.address)
