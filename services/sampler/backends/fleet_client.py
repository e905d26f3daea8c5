"""Client of a gateway's fleet service, to which this sampler reports."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from datetime import timedelta
from typing import Any

import grpc
from google.protobuf import duration_pb2

from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc
from twinkle.api.sampler.v1 import engine_pb2
from twinkle_services.kit.rpc.fields import duration_from_proto
from twinkle_services.kit.rpc.status import error_from_call
from twinkle_services.sampler.domain.fleet import LeaseRenewal, Registration, ReplicaReport
from twinkle_services.sampler.domain.generation import EngineLoad
from twinkle_services.sampler.domain.residency import ResidentVersion

_MIN_LEASE, _MAX_LEASE = timedelta(milliseconds=10), timedelta(days=1)
"""Bounds of the lease interval that a gateway may set."""
_CALL_SECONDS = 10.0
"""Timeout of `register`."""
MAX_RESIDENT = 4096
"""Maximum number of versions in one report, which contains the most recently used ones."""


class FleetClient:
    """Implements `ports.FleetGateway`."""

    def __init__(self, address: str, channel: grpc.aio.Channel) -> None:
        """Create a client.

        Args:
            address: Address of the gateway, `host:port`.
            channel: Channel to the gateway, opened with `open_channel`; the caller closes it.
        """
        self.address = address
        self._stub = fleet_service_pb2_grpc.FleetServiceStub(channel)

    async def register(self, report: ReplicaReport) -> Registration:
        request = wire.RegisterRequest(replica=_replica(report))
        try:
            response = await self._stub.Register(request, timeout=_CALL_SECONDS)
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='gateway') from error
        interval = _interval(response.lease_interval)
        return Registration(lease_interval=interval, checkpoint_address=response.checkpoint_address)

    async def lease(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[LeaseRenewal, None]:
        queue = _ReportQueue()
        filling = asyncio.create_task(queue.fill(reports), name=f'report to {self.address}')
        call: Any = self._stub.Lease(queue.messages())
        try:
            async for response in call:
                yield LeaseRenewal(
                    lease_interval=_interval(response.lease_interval),
                    is_drain_requested=response.is_drain_requested,
                    weight_source_address=response.weight_source_address,
                )
            if filling.done():
                # Re-raise the error if a report could not be created.
                await filling
        except grpc.aio.AioRpcError as error:
            raise error_from_call(error, service='gateway') from error
        finally:
            filling.cancel()
            call.cancel()
            await asyncio.wait([filling])


class _ReportQueue:
    """A queue between the generator of reports and a call that may stop reading the reports at any time."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[ReplicaReport | None] = asyncio.Queue(maxsize=1)

    async def fill(self, reports: AsyncIterator[ReplicaReport]) -> None:
        """Put reports into the queue until `reports` ends or this task is cancelled.

        At the end, a report that was not yet read is discarded, so that `messages` ends.
        """
        try:
            async for report in reports:
                await self._queue.put(report)
        finally:
            if self._queue.full():
                self._queue.get_nowait()
            self._queue.put_nowait(None)

    async def messages(self) -> AsyncGenerator[wire.LeaseRequest, None]:
        """Yield the reports as messages until `fill` has returned."""
        while (report := await self._queue.get()) is not None:
            yield wire.LeaseRequest(replica=_replica(report))


def _interval(message: duration_pb2.Duration) -> timedelta:
    return duration_from_proto(message, 'lease_interval', minimum=_MIN_LEASE, maximum=_MAX_LEASE)


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
    """Convert a resident version; the `adapter_id` of a checkpoint is its path, without the digest."""
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
