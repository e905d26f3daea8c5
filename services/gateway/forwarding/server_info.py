"""Answers GetServerInfo for the gateway and the services behind it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any

import grpc

from services.gateway.fleet.upstreams import ServiceFacts
from services.kit.rpc.server_info import CONTRACT_VERSION
from twinkle.api.server.v1 import server_service_pb2 as messages
from twinkle.api.server.v1 import server_service_pb2_grpc


class MergedServerInfoServicer(server_service_pb2_grpc.ServerServiceServicer):
    """Describes the gateway first, then the services in a fixed order."""

    def __init__(self, *, own: Callable[[], messages.ServiceInfo], upstreams: Sequence[ServiceFacts]) -> None:
        self._own = own
        self._upstreams = tuple(upstreams)

    async def GetServerInfo(  # noqa: N802 (the contract's name)
        self, request: messages.GetServerInfoRequest, context: grpc.aio.ServicerContext[Any, Any]
    ) -> messages.GetServerInfoResponse:
        others = await asyncio.gather(*(upstream.describe() for upstream in self._upstreams))
        own = self._own()
        _copy_support(own, others)
        return messages.GetServerInfoResponse(contract_version=CONTRACT_VERSION, services=[own, *others])


def _copy_support(own: messages.ServiceInfo, others: Sequence[messages.ServiceInfo]) -> None:
    """Report a forwarded method as supported if its own service does."""
    support: dict[str, bool] = {}
    for item in (item for info in others for item in info.methods):
        support[item.method] = support.get(item.method, False) or item.is_supported
    for item in own.methods:
        if not item.method.startswith('twinkle.api.server.'):
            item.is_supported = support.get(item.method, item.is_supported)
