"""Samplers relay versions over loopback: a chain of samplers, and the failure of a sampler in the chain."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fixtures.checkpoint_service import ALICE as ALICE_SERVICE
from fixtures.checkpoint_service import Running, failure_of, serving
from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.sampled import lora_state, lora_tensors
from fixtures.sampler_service import RunningSampler, read_answer, sample_request, serving_sampler, tenant
from twinkle.api.checkpoint.v1 import weight_stream_service_pb2, weight_stream_service_pb2_grpc
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.sampler.v1 import sampling_pb2
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.kit.weights import Devices, DevicesConfig, Segments
from twinkle_services.sampler.backends.weight_sources import WeightSources
from twinkle_services.sampler.domain.adapter import AdapterKey, VersionKey

ALICE = tenant('alice')
VERSIONS = 50
UNREACHABLE = '127.0.0.1:1'


class Node:
    """A sampler of a chain: its engine, its service and its sources of weights."""

    def __init__(self, stack: AsyncExitStack, running: RunningSampler, sources: WeightSources) -> None:
        self.stack, self.running, self.sources = stack, running, sources

    @property
    def engine(self) -> FakeSamplerEngine:
        """The engine with the loaded versions."""
        engine = self.running.engine
        assert isinstance(engine, FakeSamplerEngine)
        return engine

    async def sample(self, version: int) -> int:
        """Sample from version `version` or newer, and return the used version."""
        ref = sampling_pb2.AdapterRef(adapter_id='ad-1', at_least=version)
        ref.wait_timeout.FromTimedelta(timedelta(seconds=60))
        answer = await read_answer(self.running.stub.Sample(sample_request(ref), metadata=ALICE))
        return answer.spans[0][0][0]


async def publish(checkpoint: Running, version: int) -> None:
    """Publish weights that depend on the version."""
    with acting_for(ALICE_SERVICE):
        await checkpoint.weights.publish_version('ad-1', lora_state(version), version=version)


async def node(
    checkpoint_address: str,
    folder: Path,
    *,
    relay: Node | None,
    segments: Segments | None = None,
    devices: Devices | None = None,
) -> Node:
    """Start a sampler that fetches weights from `relay`, if a relay is given."""
    stack = AsyncExitStack()
    sources = WeightSources(checkpoint_address, segments=segments, devices=devices)
    stack.push_async_callback(sources.close)
    if relay is not None:
        sources.use_relay(relay.running.address)
    host_id = segments.host_id if segments else ''
    engine = FakeSamplerEngine()
    running = await stack.enter_async_context(
        serving_sampler(engine, sources, folder, host_id=host_id, devices=devices, max_resident_versions=4)
    )
    return Node(stack, running, sources)


@pytest.fixture
async def checkpoint(tmp_path: Path) -> AsyncIterator[Running]:
    """The checkpoint service, which a trainer publishes to."""
    async with serving(tmp_path / 'checkpoint', ring_capacity=8) as running:
        yield running


@asynccontextmanager
async def running_chain(first: str, others: str, folder: Path, *, way: str) -> AsyncIterator[list[Node]]:
    """Run three samplers in a chain; each fetches weights from the previous one.

    Args:
        first: Address of the checkpoint service for the first sampler.
        others: Address of the checkpoint service for the other two samplers.
        folder: Folder for the state of the samplers.
        way: How weights are transferred: `bytes`, `shared` memory, or `gloo` between samplers.
    """
    segments = Segments(folder / 'segments') if way == 'shared' else None
    devices = Devices(DevicesConfig(names=('gloo',), min_bytes=1)) if way == 'gloo' else None
    nodes: list[Node] = []
    for number in range(3):
        relay = nodes[-1] if nodes else None
        address = others if nodes else first
        nodes.append(await node(address, folder / str(number), relay=relay, segments=segments, devices=devices))
    yield nodes
    for item in reversed(nodes):
        await item.stack.aclose()


@pytest.fixture(params=['bytes', 'shared', 'gloo'])
async def chain(request: pytest.FixtureRequest, checkpoint: Running, tmp_path: Path) -> AsyncIterator[list[Node]]:
    """Three samplers that can all reach the checkpoint service, for each way of transferring weights."""
    async with running_chain(checkpoint.address, checkpoint.address, tmp_path, way=request.param) as nodes:
        yield nodes


def check_weights(item: Node, version: int) -> None:
    """Check that an engine's weights of a version equal the published weights."""
    loaded = item.engine.loaded[VersionKey(AdapterKey('alice', 'ad-1'), version)]
    for name, tensor in lora_tensors(version).items():
        assert bytes(loaded.tensors[name].data) == bytes(tensor.data)


@pytest.mark.parametrize(('way', 'versions'), [('bytes', VERSIONS), ('shared', VERSIONS), ('gloo', 10)])
async def test_versions_are_relayed_along_the_chain(checkpoint, tmp_path, way, versions):
    """The last sampler, which cannot reach the checkpoint service, receives every version bitwise unchanged."""
    async with running_chain(checkpoint.address, UNREACHABLE, tmp_path, way=way) as chain:
        for version in range(1, versions + 1):
            await publish(checkpoint, version)
            assert await chain[2].sample(version) == version
            check_weights(chain[2], version)


async def test_relay_failure_loses_no_version(chain, checkpoint):
    """A sampler whose relay stops continues from the checkpoint service without missing a version."""
    await publish(checkpoint, 1)
    assert [await item.sample(1) for item in chain] == [1, 1, 1]
    for version in range(2, 12):
        await publish(checkpoint, version)
        if version == 6:
            await chain[1].stack.aclose()
        assert await chain[2].sample(version) == version
        check_weights(chain[2], version)
    assert await chain[0].sample(11) == 11


async def test_silent_relay_is_abandoned(checkpoint, tmp_path):
    """A silent relay is not used after the timeout `patience`, and its connection is closed."""
    sources = WeightSources(checkpoint.address, patience=timedelta(seconds=0.05))
    with socket.create_server(('127.0.0.1', 0)) as silent:
        sources.use_relay(f'127.0.0.1:{silent.getsockname()[1]}')
        async with serving_sampler(FakeSamplerEngine(), sources, tmp_path / 'sampler') as running:
            await publish(checkpoint, 1)
            ref = sampling_pb2.AdapterRef(adapter_id='ad-1')
            answer = await read_answer(running.stub.Sample(sample_request(ref), metadata=ALICE))
            assert answer.spans == [[(1, 0, 6)]]
            await asyncio.to_thread(_read_to_end, silent)
        await sources.close()


def _read_to_end(listener: socket.socket) -> None:
    """Wait until the peer has closed the connection."""
    connection, _ = listener.accept()
    with connection:
        while connection.recv(4096):
            pass


async def test_fleet_assigns_another_relay_to_a_sampler(chain, checkpoint):
    """A sampler that is assigned another relay, or none, continues to receive new versions."""
    await publish(checkpoint, 1)
    assert await chain[2].sample(1) == 1
    for version, address in ((2, ''), (3, chain[0].running.address), (4, UNREACHABLE), (5, '')):
        chain[2].sources.use_relay(address)
        await publish(checkpoint, version)
        assert await chain[2].sample(version) == version


async def test_weights_are_relayed_only_for_their_tenant(chain, checkpoint):
    """A service that calls on behalf of another tenant cannot fetch the weights."""
    await publish(checkpoint, 1)
    await chain[0].sample(1)
    channel = open_channel(chain[0].running.address)
    stub = weight_stream_service_pb2_grpc.WeightStreamServiceStub(channel)
    reference = weight_stream_service_pb2.VersionRef(adapter_id='ad-1', version=1)
    request = weight_stream_service_pb2.FetchRequest(version=reference)

    async def refusal(metadata: Any) -> Any:
        return await failure_of(stub.Fetch(request, metadata=metadata))

    other = await refusal((('x-twinkle-tenant', 'bob'), ('x-twinkle-internal', '1')))
    assert other.reason == 'VERSION_NOT_FOUND'
    await channel.close()


async def test_address_of_the_checkpoint_service_can_be_set_later(checkpoint, tmp_path):
    """A request waits for its version until the address of the checkpoint service is known."""
    sources = WeightSources()
    async with serving_sampler(FakeSamplerEngine(), sources, tmp_path / 'sampler') as running:
        await publish(checkpoint, 1)
        ref = sampling_pb2.AdapterRef(adapter_id='ad-1')
        waiting = asyncio.ensure_future(read_answer(running.stub.Sample(sample_request(ref), metadata=ALICE)))
        await running.stub.GetLoad(wire.GetLoadRequest(), metadata=ALICE)
        sources.use_checkpoint(checkpoint.address)
        assert (await waiting).spans == [[(1, 0, 6)]]
    await sources.close()
