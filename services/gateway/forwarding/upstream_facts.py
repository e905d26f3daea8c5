"""What a service behind the gateway says of itself, asked over gRPC and remembered briefly."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import grpc

from services.kit.clock import Clock
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc

TIMEOUT_SECONDS = 2.0
"""How long a service may take to answer before it counts as unreachable."""


class GrpcUpstreamFacts:
    """Asks one service.

    Concurrency: questions at the same time are asked once.
    """

    def __init__(self, service: str, *, channel: grpc.aio.Channel | None, clock: Clock, freshness: timedelta) -> None:
        """Ask `service` over `channel`; None means that it is not part of this deployment."""
        self._service = service
        self._stub = None if channel is None else server_service_pb2_grpc.ServerServiceStub(channel)
        self._clock = clock
        self._freshness_seconds = freshness.total_seconds()
        self._lock = asyncio.Lock()
        self._info: server_service_pb2.ServiceInfo | None = None
        self._stale_at = 0.0

    async def describe(self) -> server_service_pb2.ServiceInfo:
        """Return the service's part of the answer; `is_reachable` is false where it gave none."""
        async with self._lock:
            if self._info is None or self._stale_at <= self._clock.monotonic():
                self._info = await self._ask()
                self._stale_at = self._clock.monotonic() + self._freshness_seconds
            return self._info

    async def _ask(self) -> server_service_pb2.ServiceInfo:
        unreachable = server_service_pb2.ServiceInfo(service=self._service)
        if self._stub is None:
            return unreachable
        try:
            response = await self._stub.GetServerInfo(
                server_service_pb2.GetServerInfoRequest(), timeout=TIMEOUT_SECONDS
            )
        except grpc.aio.AioRpcError:
            return unreachable
        # A service answers for itself alone, so the first part is all there is.
        return response.services[0] if response.services else unreachable
