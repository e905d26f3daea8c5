"""Followers with a base version receive deltas, and followers with shared memory receive segments."""

from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest

from fixtures.checkpoint_service import ALICE, Running, make_state, publish_and_follow, serving
from twinkle.checkpoint_engine import PackedState, pack_state, plan_state, unpack_state
from twinkle.data_format import TensorData
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Encoding, Segments
from twinkle_services.kit.weights.wire import WeightClient


@pytest.fixture
async def service(tmp_path: Path) -> AsyncIterator[Running]:
    """A service whose shared memory is a folder of the test; calls are made for Alice."""
    async with serving(tmp_path) as running:
        with acting_for(ALICE):
            yield running


def changed_state(state: PackedState, seed: int) -> PackedState:
    """Return the state with the two lowest bits of each byte changed at random."""
    bits = np.random.default_rng(seed).integers(0, 4, len(state.data), np.uint8)
    tensors = unpack_state(state.manifest, (np.frombuffer(state.data, np.uint8) ^ bits).tobytes())
    return pack_state(tensors, base_model=state.manifest.base_model, lora_config=state.manifest.lora_config)


async def test_follower_on_another_host_gets_deltas(service: Running) -> None:
    """A follower without shared memory receives the first version in full, and later versions as smaller deltas."""
    states = [make_state(1, size_bytes=3 << 20)]
    states += [changed_state(states[-1], 1), changed_state(states[0], 2)]
    received_states = await publish_and_follow(service.weights, service.weights, states)
    assert [received.state for received in received_states] == states
    assert [received.encoding for received in received_states] == [Encoding.WHOLE, Encoding.DELTA, Encoding.DELTA]
    assert all(received.wire_size_bytes < 0.4 * len(states[0].data) for received in received_states[1:])


async def test_trainer_and_follower_on_the_same_host_share_memory(service: Running, tmp_path: Path) -> None:
    """A follower that shares memory with the publisher and the service receives segments instead of bytes."""
    folder = tmp_path / 'memory'
    publisher, client = (WeightClient(service.channel, segments=Segments(folder)) for _ in range(2))
    states = [make_state(seed, size_bytes=1 << 20) for seed in range(3)]
    received_states = await publish_and_follow(client, publisher, states)
    assert [received.state for received in received_states] == states
    assert {received.encoding for received in received_states} == {Encoding.SHARED_MEMORY}
    assert {received.wire_size_bytes for received in received_states} == {0}
    assert all(Path(received.segment_path).is_file() for received in received_states)  # noqa: ASYNC240 (in memory)


async def test_full_parameter_versions_are_published_and_followed(service: Running, tmp_path: Path) -> None:
    """Full-parameter versions can be planned, published, fetched and followed like adapter versions."""
    weights = {'model.norm.weight': TensorData('bfloat16', (1 << 12,), np.random.default_rng(1).bytes(1 << 13))}
    plan = plan_state(weights, base_model='org/tiny', lora_config=None)
    shared = WeightClient(service.channel, segments=Segments(tmp_path / 'memory'))
    await shared.publish_version('ad-1', plan, version=1)
    for client in (shared, service.weights):
        received = await client.fetch_version('ad-1')
        assert received.state.manifest.lora_config is None
        assert unpack_state(received.state.manifest, received.state.data) == weights
    received_states = await publish_and_follow(service.weights, shared, [plan.pack(), changed_state(plan.pack(), 3)])
    assert received_states[1].encoding is Encoding.DELTA


async def test_segments_of_killed_services_are_removed_at_shutdown(tmp_path: Path) -> None:
    """When the service shuts down, it removes the segments of killed processes."""
    async with serving(tmp_path):
        segment = tmp_path / 'memory' / f'{"0" * 16}.{"1" * 16}'
        segment.write_bytes(b'weights of a killed process')
    assert not segment.exists()
