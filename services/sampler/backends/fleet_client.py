"""A gateway's fleet service, as this sampler reports to it."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf import duration_pb2

from services.kit.rpc.fields import duration_from_proto
from services.kit.rpc.status import error_from_call
from services.sampler.domain.fleet import ReplicaReport, Welcome, Wish
from services.sampler.domain.generation import EngineLoad
from services.sampler.domain.residency import ResidentVersion
from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc
from twinkle.api.sampler.v1 import engine_pb2

_LEAST_LEASE, _MOST_LEASE = timedelta(milliseconds=10), timedelta(days=1)
_CALL_SECONDS = 10.0
MAX_RESIDENT = 4096
"""Versions that one report names; the most recently used are those worth knowing."""


class FleetClient:
    """Implements `ports.FleetGateway`."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        """Use a channel of `open_channel` that leads to the gateway at `address`; it stays the caller's to close."""
        self.address = address
        self._stub = fleet_service_pb2_grpc.FleetServiceStub(channel)

    async def register(self, report: ReplicaReport) -> Welcome:
        """Join the fleet; see the port."""
        request = wire.RegisterRequest(replica=_replica(report))
        try:
            answer = await self._stub.Register(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='gateway') from error
        return Welcome(lease=_lease(answer.lease_interval), checkpoint_address=answer.checkpoint_address)

    async def lease(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[Wish, None]:
        """Keep the lease; see the port."""
        outbox = _Outbox()
        filling = asyncio.create_task(outbox.fill(reports), name=f'report to {self.address}')
        call: Any = self._stub.Lease(outbox.messages())
        try:
            async for answer in call:
                yield Wish(
                    lease=_lease(answer.lease_interval),
                    is_drain_requested=answer.is_drain_requested,
                    weight_source_address=answer.weight_source_address,
                )
            if filling.done():
                # A report that could not be made has ended the lease.
                await filling
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='gateway') from error
        finally:
            filling.cancel()
            call.cancel()
            await asyncio.wait([filling])


class _Outbox:
    """Reports on their way into a call, which may stop reading them at any time without saying so."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ReplicaReport | None] = asyncio.Queue(maxsize=1)

    async def fill(self, reports: AsyncIterator[ReplicaReport]) -> None:
        """Take reports in until cancelled; nobody reads `reports` any more when this has ended."""
        try:
            async for report in reports:
                await self._queue.put(report)
        finally:
            if self._queue.full():
                self._queue.get_nowait()
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncGenerator[wire.LeaseRequest, None]:
        """Yield them for the call, until no more are taken in."""
        while (report := await self._queue.get()) is not None:
            yield wire.LeaseRequest(replica=_replica(report))


def _lease(message: duration_pb2.Duration) -> timedelta:
    return duration_from_proto(message, 'lease_interval', least=_LEAST_LEASE, most=_MOST_LEASE)


def _replica(report: ReplicaReport) -> wire.Replica:
    state = wire.REPLICA_STATE_DRAINING if report.is_draining else wire.REPLICA_STATE_READY
    return wire.Replica(
        replica_id=report.replica_id,
        service='sampler',
        address=report.address,
        base_models=[report.base_model],
        state=state,
        resident_adapters=[_resident(version) for version in report.resident[:MAX_RESIDENT]],
        load=_load(report.load),
        engine=report.engine,
        followed_run=report.followed_run,
    )


def _resident(version: ResidentVersion) -> engine_pb2.ResidentAdapter:
    """Return a version that is held. A checkpoint is named by its path."""
    return engine_pb2.ResidentAdapter(
        adapter_id=version.key.adapter.name.partition('#')[0],
        version=version.key.version,
        size_bytes=version.size_bytes,
        sequence_count=version.use_count,
    )


def _load(load: EngineLoad) -> engine_pb2.EngineLoad:
    return engine_pb2.EngineLoad(
        running_sequence_count=load.running_sequences,
        waiting_sequence_count=load.waiting_sequences,
        kv_usage=load.kv_usage,
        tokens_per_second=load.tokens_per_second,
        prefix_hit_rate=load.prefix_hit_rate,
        is_paused=load.is_paused,
        is_sleeping=load.is_sleeping,
        max_sequence_count=load.max_sequences,
    )
