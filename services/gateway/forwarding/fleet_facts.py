"""What the samplers of the fleet say of themselves, as the answer of one service."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from datetime import timedelta

import grpc

from services.gateway.forwarding.upstream_facts import GrpcUpstreamFacts
from services.kit.clock import Clock
from services.kit.rpc.channel import open_channel
from services.kit.tls import TlsConfig
from twinkle.api.server.v1 import server_service_pb2


class GrpcFleetFacts:
    """Asks every sampler of the fleet; each answer is remembered briefly."""

    def __init__(
        self,
        addresses: Callable[[], Sequence[str]],
        *,
        internal_token: str,
        clock: Clock,
        freshness: timedelta,
        tls: TlsConfig | None = None,
    ) -> None:
        """Ask whoever is at `addresses` at the time; `tls` is the gateway's, unset: plaintext."""
        self._tls = tls or TlsConfig()
        self._addresses = addresses
        self._internal_token = internal_token
        self._clock = clock
        self._freshness = freshness
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._known: dict[str, GrpcUpstreamFacts] = {}

    async def describe(self) -> server_service_pb2.ServiceInfo:
        """Return what the fleet can; `is_reachable` is false where no sampler answered."""
        addresses = self._addresses()
        await self._forget_all_but(addresses)
        answers = await asyncio.gather(*(self._facts_of(address).describe() for address in addresses))
        return merged([answer for answer in answers if answer.is_reachable])

    async def close(self) -> None:
        """Close the channels."""
        await self._forget_all_but(())

    def _facts_of(self, address: str) -> GrpcUpstreamFacts:
        if address not in self._known:
            self._channels[address] = open_channel(
                address, internal_token=self._internal_token, tls=self._tls, service='sampler'
            )
            self._known[address] = GrpcUpstreamFacts(
                'sampler', channel=self._channels[address], clock=self._clock, freshness=self._freshness
            )
        return self._known[address]

    async def _forget_all_but(self, addresses: Sequence[str]) -> None:
        for address in [address for address in self._known if address not in addresses]:
            del self._known[address]
            await self._channels.pop(address).close()


def merged(answers: Sequence[server_service_pb2.ServiceInfo]) -> server_service_pb2.ServiceInfo:
    """Return one answer for several samplers: the first one's, with every base model and method that any has."""
    if not answers:
        return server_service_pb2.ServiceInfo(service='sampler')
    whole = server_service_pb2.ServiceInfo()
    whole.CopyFrom(answers[0])
    whole.service = 'sampler'
    models = {model.base_model: model for model in whole.base_models}
    methods = {method.method: method for method in whole.methods}
    whole.engine_version = ', '.join(sorted({answer.engine_version for answer in answers} - {''}))
    for answer in answers[1:]:
        for model in answer.base_models:
            if model.base_model not in models:
                models[model.base_model] = whole.base_models.add()
                models[model.base_model].CopyFrom(model)
            models[model.base_model].is_sampleable |= model.is_sampleable
        for method in answer.methods:
            if method.method in methods:
                methods[method.method].is_supported |= method.is_supported
    return whole
