"""Tests of the fleet service: which replicas may join, how they join and leave, and which keys may list them."""

import asyncio
from datetime import timedelta
from pathlib import Path

import grpc
import pytest

from fixtures.fake_samplers import FakeSampler, until
from fixtures.fleet import INTERNAL, replica_of, running_fleet
from fixtures.gateway_upstream import TOKEN
from fixtures.running_gateway import ADMIN, bearer, failure_of, running_gateway
from fixtures.sampled_answers import read_answer, sample_request, undisturbed
from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.gateway.config import FleetConfig

UNREACHABLE = FakeSampler(address='127.0.0.1:1')


def register(gateway, **fields):
    """Start the registration of a replica."""
    stub = fleet_service_pb2_grpc.FleetServiceStub(gateway.channel)
    return stub.Register(wire.RegisterRequest(replica=replica_of(UNREACHABLE, 'r', **fields)), metadata=INTERNAL)


async def test_registration_needs_the_internal_token(tmp_path: Path) -> None:
    """A caller without the token cannot register a replica or hold a lease, even with a key with all scopes."""
    async with running_gateway(tmp_path) as gateway:
        stub = fleet_service_pb2_grpc.FleetServiceStub(gateway.channel)
        request = wire.RegisterRequest(replica=replica_of(UNREACHABLE, 'r'))
        for metadata, reason in (
            (ADMIN, 'SCOPE_MISSING'),
            ((*ADMIN, ('x-twinkle-internal', '1')), 'SCOPE_MISSING'),
            (bearer(TOKEN + 'x'), 'CREDENTIALS_INVALID'),
            ((('x-twinkle-internal', '1'),), 'CREDENTIALS_MISSING'),
        ):
            assert (await failure_of(stub.Register(request, metadata=metadata))).reason == reason
            assert (await failure_of(stub.Lease(iter(()), metadata=metadata))).reason == reason
        failure = await failure_of(stub.ListReplicas(wire.ListReplicasRequest(), metadata=INTERNAL))
        assert failure.reason == 'CREDENTIALS_INVALID'
        response = await stub.Register(request, metadata=INTERNAL)
        assert response.lease_interval.ToTimedelta() == timedelta(seconds=10)


async def test_loopback_deployment_without_a_token_accepts_registrations(tmp_path: Path) -> None:
    """Replicas join a deployment without a token without credentials, and an API key is refused."""
    async with running_gateway(tmp_path, internal_token='') as gateway:
        stub = fleet_service_pb2_grpc.FleetServiceStub(gateway.channel)
        request = wire.RegisterRequest(replica=replica_of(UNREACHABLE, 'r'))
        await stub.Register(request)
        assert (await failure_of(stub.Register(request, metadata=ADMIN))).reason == 'SCOPE_MISSING'


@pytest.mark.parametrize(
    'address', ['', 'host', 'host:0', 'host:65536', '[::1', '::1:80', 'a b:80', '-a:80', '1.2.3.4.5_:9']
)
async def test_malformed_address_is_refused(tmp_path: Path, address: str) -> None:
    """A replica whose address cannot be called is refused."""
    async with running_gateway(tmp_path) as gateway:
        failure = await failure_of(register(gateway, address=address))
        assert (failure.reason, failure.metadata['field']) == ('INVALID_FIELD', 'replica.address')


@pytest.mark.parametrize('address', ['0.0.0.0:900', '[::]:900'])
async def test_wildcard_address_is_replaced_by_the_source_address(tmp_path: Path, address: str) -> None:
    """A wildcard address is replaced by the address from which the replica registered."""
    async with running_fleet(tmp_path) as fleet:
        await register(fleet.gateway, address=address)
        assert (await fleet.replicas())['r'].address == '127.0.0.1:900'


async def test_replica_is_lost_or_leaves_after_a_drain(tmp_path: Path) -> None:
    """A replica whose lease is cancelled is lost; a replica whose lease ends after a drain is removed."""
    async with running_fleet(tmp_path, FakeSampler(), FakeSampler()) as fleet:
        fleet.leases[0].call.cancel()
        await fleet.until_state('r0', wire.REPLICA_STATE_LOST)
        drained = await fleet.fleet.Drain(wire.DrainRequest(replica_id='r1'), metadata=ADMIN)
        assert drained.replica.state == wire.REPLICA_STATE_DRAINING
        assert (await fleet.leases[1].report()).is_drain_requested
        await fleet.leases[1].call.done_writing()
        await fleet.until_state('r1', None)
        failure = await failure_of(fleet.fleet.Drain(wire.DrainRequest(replica_id='r1'), metadata=ADMIN))
        assert failure.reason == 'REPLICA_NOT_FOUND'


async def test_lease_needs_a_registration(tmp_path: Path) -> None:
    """A lease of an unknown replica is refused, so that replicas register again after a restart of the gateway."""
    async with running_fleet(tmp_path) as fleet:
        call = fleet.fleet.Lease(metadata=INTERNAL)
        await call.write(wire.LeaseRequest(replica=replica_of(UNREACHABLE, 'unknown')))
        assert (await failure_of(call)).reason == 'REPLICA_NOT_FOUND'


async def test_silent_replica_is_lost(tmp_path: Path) -> None:
    """A lease that is not renewed in time expires although its stream is open; a late report renews the lease."""
    options = FleetConfig(lease=timedelta(milliseconds=500))
    async with running_fleet(tmp_path, FakeSampler(), fleet=options) as fleet:
        fleet.gateway.clock.advance(timedelta(seconds=1))
        await fleet.until_state('r0', wire.REPLICA_STATE_LOST)
        await fleet.leases[0].report()
        await fleet.until_state('r0', wire.REPLICA_STATE_READY)


async def test_drained_replica_finishes_its_streams_and_gets_no_new_ones(tmp_path: Path) -> None:
    """Running streams finish on the drained replica, and new streams run on another replica."""
    samplers = [FakeSampler(), FakeSampler()]
    async with running_fleet(tmp_path, *samplers) as fleet:
        for sampler in samplers:
            sampler.gate.clear()
        requests = [sample_request([index]) for index in range(8)]
        read_tasks = [
            asyncio.ensure_future(read_answer(fleet.stub.Sample(request, metadata=ADMIN))) for request in requests
        ]
        await until(lambda: sum(sampler.open_streams for sampler in samplers) == 8)
        before = len(samplers[0].calls)
        assert before
        await fleet.fleet.Drain(wire.DrainRequest(replica_id='r0'), metadata=ADMIN)
        for sampler in samplers:
            sampler.gate.set()
        for request, response in zip(requests, await asyncio.gather(*read_tasks), strict=True):
            assert response.tokens == undisturbed(request)
        for request in requests:
            await read_answer(fleet.stub.Sample(request, metadata=ADMIN))
        assert len(samplers[0].calls) == before
        assert samplers[0].open_streams == 0


async def test_replicas_are_listed_in_pages_and_watched(tmp_path: Path) -> None:
    """Each replica is on one page, and a watch sends all replicas, the event `is_synced`, and then changes."""
    async with running_fleet(tmp_path, *(FakeSampler() for _ in range(3))) as fleet:
        found, token = [], ''
        while True:
            request = wire.ListReplicasRequest(page_size=2, page_token=token)
            page = await fleet.fleet.ListReplicas(request, metadata=ADMIN)
            found += [replica.replica_id for replica in page.replicas]
            token = page.next_page_token
            if not token:
                break
        assert found == ['r0', 'r1', 'r2']
        watch = aiter(fleet.fleet.WatchFleet(wire.WatchFleetRequest(), metadata=ADMIN))
        events = [await anext(watch) for _ in range(4)]
        assert {event.replica.replica_id for event in events[:3]} == set(found)
        assert events[3].is_synced
        fleet.leases[1].call.cancel()
        event = await anext(watch)
        assert (event.replica.replica_id, event.replica.state) == ('r1', wire.REPLICA_STATE_LOST)
        failure = await failure_of(fleet.fleet.WatchFleet(wire.WatchFleetRequest(resume_token='x.1'), metadata=ADMIN))
        assert failure.reason == 'INVALID_FIELD'


async def test_weights_are_relayed_along_a_tree(tmp_path: Path) -> None:
    """Each sampler except the first fetches weights from the previous sampler if the fan-out is one."""
    samplers = [FakeSampler() for _ in range(3)]
    async with running_fleet(tmp_path, *samplers, fleet=FleetConfig(relay_fan_out=1)) as fleet:
        reports = [await lease.report() for lease in fleet.leases]
        assert [report.weight_source_address for report in reports] == ['', samplers[0].address, samplers[1].address]


async def test_server_info_covers_the_whole_fleet(tmp_path: Path) -> None:
    """The server information lists a base model of several replicas once, and an empty fleet as unreachable."""
    async with running_fleet(tmp_path) as fleet:
        stub = server_service_pb2_grpc.ServerServiceStub(fleet.gateway.channel)
        request = server_service_pb2.GetServerInfoRequest()
        info = {part.service: part for part in (await stub.GetServerInfo(request, metadata=ADMIN)).services}
        assert not info['sampler'].is_reachable
        async with FakeSampler().serving() as first, FakeSampler().serving() as second:
            await fleet.join(first, 'a')
            await fleet.join(second, 'b')
            info = {part.service: part for part in (await stub.GetServerInfo(request, metadata=ADMIN)).services}
        assert info['sampler'].is_reachable
        assert [(model.base_model, model.is_sampleable) for model in info['sampler'].base_models] == [('tiny', True)]
        support = {item.method: item.is_supported for item in info['gateway'].methods}
        assert support['twinkle.api.sampler.v1.SamplerService/Sample']


async def test_fleet_methods_need_the_operator_scope(tmp_path: Path) -> None:
    """A key without the scope `operator` cannot list, watch or drain replicas."""
    async with running_fleet(tmp_path, FakeSampler()) as fleet:
        key = await fleet.gateway.make_key('alice', scopes=(2,))
        calls = [
            fleet.fleet.ListReplicas(wire.ListReplicasRequest(), metadata=bearer(key.secret)),
            fleet.fleet.Drain(wire.DrainRequest(replica_id='r0'), metadata=bearer(key.secret)),
            fleet.fleet.WatchFleet(wire.WatchFleetRequest(), metadata=bearer(key.secret)),
        ]
        for call in calls:
            failure = await failure_of(call)
            assert (failure.code, failure.reason) == (grpc.StatusCode.PERMISSION_DENIED, 'SCOPE_MISSING')
