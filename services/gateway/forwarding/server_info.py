"""Serves GetServerInfo for the gateway and the services behind it, in one answer."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import grpc

from services.kit.rpc.server_info import CONTRACT_VERSION
from twinkle.api.server.v1 import server_service_pb2 as messages
from twinkle.api.server.v1 import server_service_pb2_grpc


class UpstreamFacts(Protocol):
    """Knows what one service behind the gateway says of itself."""

    async def describe(self) -> messages.ServiceInfo:
        """Return the service's part of the answer; `is_reachable` is false where it gave none."""
        ...


class MergedServerInfoServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Answers with the gateway's part first, then the others in their fixed order."""

    def __init__(self, *, own: Callable[[], messages.ServiceInfo], upstreams: Sequence[UpstreamFacts]) -> None:
        """Merge `own` with what the upstreams say."""
        self._own = own
        self._upstreams = tuple(upstreams)

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: messages.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> messages.GetServerInfoResponse:
        """Return what is served here."""
        others = await asyncio.gather(*(upstream.describe() for upstream in self._upstreams))
        own = self._own()
        _take_support(own, others)
        return messages.GetServerInfoResponse(contract_version=CONTRACT_VERSION, services=[own, *others])


def _take_support(own: messages.ServiceInfo, others: Sequence[messages.ServiceInfo]) -> None:
    """Say of each forwarded method what its own service says; the gateway only passes it on."""
    support: dict[str, bool] = {}
    for item in (item for info in others for item in info.methods):
        support[item.method] = support.get(item.method, False) or item.is_supported
    for item in own.methods:
        if not item.method.startswith('twinkle.api.server.'):
            item.is_supported = support.get(item.method, item.is_supported)
