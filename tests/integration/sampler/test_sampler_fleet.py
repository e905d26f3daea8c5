"""A sampler in a real gateway's fleet over loopback: it joins, reports its versions, and drains on request."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest

from fixtures.fake_sampler_engine import FakeSamplerEngine
from fixtures.gateway_upstream import TOKEN
from fixtures.running_gateway import ADMIN, RunningGateway, running_gateway
from fixtures.sampled import lora_weights
from fixtures.sampler_service import FakeWeightSource, read_answer, sample_request
from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc
from twinkle.api.sampler.v1 import sampler_service_pb2_grpc, sampling_pb2
from twinkle_services.gateway.keys.rules import DEFAULT_TENANT
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.config import LimitsConfig
from twinkle_services.kit.rpc.channel import open_channel
from twinkle_services.kit.rpc.context import acting_for
from twinkle_services.sampler.__main__ import (
    make_admission,
    make_fleet,
    make_replica,
    make_server,
    make_versions,
    serve_until_engine_fails,
)
from twinkle_services.sampler.application.versions_protocol import Versions
from twinkle_services.sampler.backends.weight_sources import WeightSources
from twinkle_services.sampler.config import SamplerConfig
from twinkle_services.sampler.domain.adapter import AdapterChoice

ALICE = Caller(tenant_id='alice', is_internal=True)


@dataclass
class Member:
    """A sampler with the components of a real process."""

    engine: FakeSamplerEngine
    source: FakeWeightSource
    versions: Versions
    serve: Callable[[], Coroutine[Any, Any, None]]


@asynccontextmanager
async def member(gateway: RunningGateway, folder: Path) -> AsyncIterator[Member]:
    """Create a sampler in the fleet of `gateway`; the sampler serves while `Member.serve` runs."""
    config = SamplerConfig(
        base_model='tiny',
        state_dir=folder,
        internal_token=TOKEN,
        gateways=(gateway.address,),
        lease_seconds=1,
        limits=LimitsConfig(queue_length=8),
    )
    engine, source, sources = FakeSamplerEngine(), FakeWeightSource(), WeightSources(internal_token=TOKEN)
    versions, admission = make_versions(config, engine, source), make_admission(config, engine)
    server = make_server(config, engine, versions, admission)
    fleet = make_fleet(config, make_replica(config, engine, versions, admission), sources, server)
    try:
        yield Member(engine, source, versions, lambda: serve_until_engine_fails(server, engine, config, fleet))
    finally:
        await versions.close()
        await sources.close()


@asynccontextmanager
async def serving(sampler: Member) -> AsyncIterator[asyncio.Task[None]]:
    task = asyncio.create_task(sampler.serve())
    try:
        yield task
    finally:
        task.cancel()
        await asyncio.wait([task])


@pytest.fixture
async def gateway(tmp_path: Path) -> AsyncIterator[RunningGateway]:
    """A gateway whose fleet is empty."""
    async with running_gateway(tmp_path / 'gateway') as running:
        yield running


class Fleet:
    """A client of the gateway's fleet service."""

    def __init__(self, gateway: RunningGateway, metadata: Any) -> None:
        self._stub = fleet_service_pb2_grpc.FleetServiceStub(gateway.channel)
        self._metadata = metadata

    async def until(self, predicate: Any) -> wire.Replica | None:
        """Return the first sampler that matches `predicate`, or None if a replica leaves first or the stream ends."""
        call = self._stub.WatchFleet(wire.WatchFleetRequest(), metadata=self._metadata)
        try:
            async for event in call:
                if event.HasField('replica') and event.replica.service == 'sampler' and predicate(event.replica):
                    return event.replica
                if event.WhichOneof('event') == 'left_replica_id':
                    return None
        finally:
            call.cancel()
        return None

    async def replica_ids(self) -> list[str]:
        answer = await self._stub.ListReplicas(wire.ListReplicasRequest(), metadata=self._metadata)
        return [replica.replica_id for replica in answer.replicas if replica.service == 'sampler']

    async def drain(self, replica_id: str) -> None:
        await self._stub.Drain(wire.DrainRequest(replica_id=replica_id), metadata=self._metadata)


@pytest.fixture
async def fleet(gateway: RunningGateway) -> Fleet:
    """The fleet of the gateway."""
    return Fleet(gateway, ADMIN)


async def test_sampler_joins_and_reports_its_versions(gateway, fleet, tmp_path):
    """The fleet shows a sampler's model, engine, capacity and resident versions."""
    async with member(gateway, tmp_path / 'sampler') as sampler, serving(sampler):
        replica = await fleet.until(lambda replica: replica.state == wire.REPLICA_STATE_READY)
        assert (replica.engine, list(replica.base_models)) == ('torch', ['tiny'])
        assert replica.load.max_sequence_count == 8
        sampler.source.publish('alice', lora_weights(1))
        async with sampler.versions.lease(ALICE, AdapterChoice(adapter_id='ad-1')):
            resident = (await fleet.until(lambda replica: bool(replica.resident_adapters))).resident_adapters
        assert [(item.adapter_id, item.version) for item in resident] == [('ad-1', 1)]


async def test_drained_sampler_finishes_its_streams_and_leaves(gateway, fleet, tmp_path):
    """A drained sampler finishes its running stream, exits without an error, and leaves the fleet."""
    async with member(gateway, tmp_path / 'sampler') as sampler, serving(sampler) as task:
        replica = await fleet.until(lambda replica: replica.state == wire.REPLICA_STATE_READY)
        channel = open_channel(replica.address, internal_token=TOKEN)
        await sampler.engine.pause()
        with acting_for(ALICE):
            call = sampler_service_pb2_grpc.SamplerServiceStub(channel).Sample(sample_request())
            reading = asyncio.ensure_future(_all(call))
            while not sampler.engine.load.running_sequences:
                await asyncio.wait([reading], timeout=0.01)
        await fleet.drain(replica.replica_id)
        await fleet.until(lambda replica: replica.state == wire.REPLICA_STATE_DRAINING)
        assert not task.done()
        await sampler.engine.resume()
        assert len(await reading) == 8
        await asyncio.wait_for(task, 60)
        await channel.close()
    while await fleet.replica_ids():
        await asyncio.wait([reading])


@pytest.mark.parametrize('version', [{}, {'exact': 2}, {'at_least': 2}], ids=['newest', 'exact', 'at least'])
async def test_replacement_waits_for_the_version_of_the_lost_sampler(gateway, fleet, tmp_path, version):
    """Requests wait until the replacement of a lost sampler has the current version, and then get this version."""
    stub = sampler_service_pb2_grpc.SamplerServiceStub(gateway.channel)
    request = sample_request(sampling_pb2.AdapterRef(adapter_id='ad-1', **version))
    async with member(gateway, tmp_path / 'lost') as lost, serving(lost):
        lost.source.publish(DEFAULT_TENANT, lora_weights(2))
        await fleet.until(lambda replica: replica.state == wire.REPLICA_STATE_READY)
        expected = await read_answer(stub.Sample(request, metadata=ADMIN))
    async with member(gateway, tmp_path / 'replacement') as replacement, serving(replacement):
        replacement.source.publish(DEFAULT_TENANT, lora_weights(1))
        if not version:
            # The source does not report the newest version yet.
            replacement.source.gate.clear()
        reading = asyncio.ensure_future(read_answer(stub.Sample(request, metadata=ADMIN)))
        await replacement.source.followed_by(1)
        if version:
            await fleet.until(lambda replica: bool(replica.resident_adapters))
        assert not replacement.engine.salts
        replacement.source.publish(DEFAULT_TENANT, lora_weights(2))
        replacement.source.gate.set()
        assert await reading == expected
        assert replacement.engine.salts
    assert expected.spans == [[(2, 0, 6)]]


async def test_failed_engine_stops_the_service(gateway, tmp_path):
    """The process exits with an error when its engine fails."""
    async with member(gateway, tmp_path / 'sampler') as sampler:
        sampler.engine.failed.set()
        with pytest.raises(SystemExit):
            await sampler.serve()


async def _all(call: grpc.aio.UnaryStreamCall[Any, Any]) -> list[Any]:
    return [response async for response in call]
