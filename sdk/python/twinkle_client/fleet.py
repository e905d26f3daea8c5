"""Administration of a gateway's replicas, for operators."""

from collections.abc import AsyncIterator
from contextlib import aclosing

from twinkle.api.gateway.v1 import fleet_service_pb2 as pb
from twinkle.api.gateway.v1.fleet_service_pb2_grpc import FleetServiceStub
from twinkle.api.model.v1.adapter_service_pb2 import EndLeaseRequest, TakeOverRequest
from twinkle.api.model.v1.adapter_service_pb2_grpc import AdapterServiceStub
from twinkle_client.client import TwinkleClient, current_client
from twinkle_client.rpc import LoopThread, remote_method, remote_stream

STATES = {
    pb.REPLICA_STATE_READY: 'ready',
    pb.REPLICA_STATE_DRAINING: 'draining',
    pb.REPLICA_STATE_LOST: 'lost',
}
"""Display names of the states."""


class FleetAdministration:
    """Lists, watches and drains replicas, ends leases of model services, and moves the runs of ended trainers.

    The API key needs the scope 'operator'. `client` defaults to the client initialized last.
    """

    def __init__(self, *, client: TwinkleClient | None = None) -> None:
        self._connection = current_client(client).connection
        self._stub = FleetServiceStub(self._connection.channel)
        self._adapters = AdapterServiceStub(self._connection.channel)

    @property
    def loop_thread(self) -> LoopThread:
        """Event loop that runs the methods."""
        return self._connection.loop_thread

    @remote_method
    async def list_replicas(self) -> list[pb.Replica]:
        """Return all registered replicas, including lost replicas."""
        replicas: list[pb.Replica] = []
        request = pb.ListReplicasRequest(page_size=1000)
        while True:
            page = await self._connection.unary(self._stub.ListReplicas, request)
            replicas += page.replicas
            if not page.next_page_token:
                return replicas
            request.page_token = page.next_page_token

    @remote_method
    async def drain(self, replica_id: str) -> pb.Replica:
        """Drain a replica, which finishes its requests and leaves the fleet; return the replica's current record.

        Raises:
            NotFoundError: The replica does not exist, or is lost.
        """
        response = await self._connection.unary(self._stub.Drain, pb.DrainRequest(replica_id=replica_id))
        return response.replica

    @remote_method
    async def end_lease(self, base_model: str) -> str:
        """Park the full-parameter run that leases a model service, and refuse the run's operations for a while.

        Args:
            base_model: Base model of the model service.

        Returns:
            Id of the run; empty if there was no lease.

        Raises:
            NotFoundError: The base model is not served.
        """
        response = await self._connection.unary(self._adapters.EndLease, EndLeaseRequest(base_model=base_model))
        return response.adapter_id

    @remote_method
    async def take_over(self, base_model: str, trainer: str) -> int:
        """Move all runs of an ended trainer to another trainer of the base model, and return their number.

        Trainers are model services with the same base model. Before the call, make sure that the process of the ended
        trainer cannot continue. The call can be repeated.

        Args:
            base_model: Base model of the trainers.
            trainer: Name of the ended trainer in the setting `peer_trainers` of the model services.

        Raises:
            NotFoundError: The base model is not served.
            UsageError: The configuration names no such trainer.
            StateError: The trainer is running, or its journal cannot be used; no run was moved.
        """
        request = TakeOverRequest(base_model=base_model, trainer=trainer)
        return (await self._connection.unary(self._adapters.TakeOver, request)).adapter_count

    @remote_stream
    async def watch(self) -> AsyncIterator[pb.WatchFleetResponse]:
        """Yield all replicas, then a message with `is_synced`, then changes. The stream ends when the gateway stops."""
        async with aclosing(self._connection.stream(self._stub.WatchFleet, pb.WatchFleetRequest())) as events:
            async for event in events:
                yield event
