"""The fleet's service of the contract. Each method converts, awaits its verb, and converts."""

# ruff: noqa: N802 (the methods have the contract's names)

from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any

import grpc

from services.gateway.fleet import convert
from services.gateway.fleet.fleet_verbs import FleetVerbs
from services.kit.paging import page_token_after, parse_page
from services.kit.rpc.context import current_caller
from services.kit.rpc.fields import duration_to_proto, id_from_proto
from twinkle.api.gateway.v1 import fleet_service_pb2 as wire
from twinkle.api.gateway.v1 import fleet_service_pb2_grpc

_Context = grpc.aio.ServicerContext[Any, Any]


class FleetServicer(fleet_service_pb2_grpc.FleetServiceServicer):
    """Lets replicas join and leave, and shows them."""

    def __init__(self, verbs: FleetVerbs) -> None:
        """Serve `verbs`."""
        self._verbs = verbs

    async def Register(self, request: wire.RegisterRequest, context: _Context) -> wire.RegisterResponse:
        """Take a replica in."""
        report = convert.report_from_proto(request.replica, peer=context.peer())
        welcome = await self._verbs.register(current_caller(), report)
        lease = duration_to_proto(self._verbs.lease.duration)
        return wire.RegisterResponse(lease_interval=lease, checkpoint_address=welcome.checkpoint_address)

    async def Lease(
        self, request_iterator: AsyncIterator[wire.LeaseRequest], context: _Context
    ) -> AsyncIterator[wire.LeaseResponse]:
        """Keep a replica in the fleet."""
        peer = context.peer()
        reports = (convert.report_from_proto(item.replica, peer=peer) async for item in request_iterator)
        async with aclosing(self._verbs.lease(current_caller(), reports)) as wishes:
            async for wish in wishes:
                yield convert.wish_to_proto(wish)

    async def Drain(self, request: wire.DrainRequest, context: _Context) -> wire.DrainResponse:
        """Ask a replica to leave."""
        replica = await self._verbs.drain(current_caller(), id_from_proto(request.replica_id, 'replica_id'))
        return wire.DrainResponse(replica=convert.replica_to_proto(replica))

    async def ListReplicas(self, request: wire.ListReplicasRequest, context: _Context) -> wire.ListReplicasResponse:
        """List the fleet."""
        page = parse_page(request.page_size, request.page_token, query='ListReplicas', key_types=(str,))
        replicas, after = await self._verbs.list_replicas(current_caller(), page)
        return convert.replicas_to_proto(replicas, next_page_token=page_token_after(after, query='ListReplicas'))

    async def WatchFleet(
        self, request: wire.WatchFleetRequest, context: _Context
    ) -> AsyncIterator[wire.WatchFleetResponse]:
        """Follow the fleet."""
        async with aclosing(self._verbs.watch_fleet(current_caller(), request.resume_token)) as events:
            async for event in events:
                yield convert.event_to_proto(event)
