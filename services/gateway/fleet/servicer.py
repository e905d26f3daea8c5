"""Serves the contract for the fleet."""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc
from twinkle_services.gateway.fleet import convert
from twinkle_services.gateway.fleet.replicas import Replicas
from twinkle_services.kit.paging import page_token_after, parse_page
from twinkle_services.kit.rpc.call import Context
from twinkle_services.kit.rpc.context import current_caller
from twinkle_services.kit.rpc.fields import duration_to_proto, id_from_proto


class FleetServicer(fleet_service_pb2_grpc.FleetServiceServicer):
    """Implements `FleetService`."""

    def __init__(self, replicas: Replicas) -> None:
        self._replicas = replicas

    async def Register(self, request: wire.RegisterRequest, context: Context) -> wire.RegisterResponse:
        report = convert.report_from_proto(request.replica, peer=context.peer())
        checkpoint_address = await self._replicas.register(current_caller(), report)
        lease = duration_to_proto(self._replicas.lease_duration)
        return wire.RegisterResponse(lease_interval=lease, checkpoint_address=checkpoint_address)

    async def Lease(
        self, request_iterator: AsyncIterator[wire.LeaseRequest], context: Context
    ) -> AsyncIterator[wire.LeaseResponse]:
        peer = context.peer()
        reports = (convert.report_from_proto(item.replica, peer=peer) async for item in request_iterator)
        async with aclosing(self._replicas.lease(current_caller(), reports)) as responses:
            async for terms in responses:
                yield convert.terms_to_proto(terms)

    async def Drain(self, request: wire.DrainRequest, context: Context) -> wire.DrainResponse:
        replica = await self._replicas.drain(current_caller(), id_from_proto(request.replica_id, 'replica_id'))
        return wire.DrainResponse(replica=convert.replica_to_proto(replica))

    async def ListReplicas(self, request: wire.ListReplicasRequest, context: Context) -> wire.ListReplicasResponse:
        page = parse_page(request.page_size, request.page_token, query='ListReplicas', key_types=(str,))
        replicas, after = await self._replicas.list(current_caller(), page)
        next_page_token = page_token_after(after, query='ListReplicas')
        return wire.ListReplicasResponse(
            replicas=map(convert.replica_to_proto, replicas), next_page_token=next_page_token
        )

    async def WatchFleet(
        self, request: wire.WatchFleetRequest, context: Context
    ) -> AsyncIterator[wire.WatchFleetResponse]:
        async with aclosing(self._replicas.watch(current_caller(), request.resume_token)) as events:
            async for event in events:
                yield convert.event_to_proto(event)
