"""Connections to replicas: shared channels, and the poll of a sampler that is named in the configuration."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Collection
from dataclasses import replace
from typing import Any, Never

import grpc
import structlog

from twinkle.api.sampler.v1 import sampler_service_pb2, sampler_service_pb2_grpc
from twinkle.api.server.v1 import server_service_pb2, server_service_pb2_grpc
from twinkle_services.gateway.errors import ReplicaNotReached
from twinkle_services.gateway.fleet.convert import load_from_proto
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.rules import ReplicaLoad, ReplicaReport
from twinkle_services.kit.errors import DomainError
from twinkle_services.kit.rpc.channel import call_errors, open_forwarding_channel
from twinkle_services.kit.tls import TlsConfig

CONNECT_SECONDS = 5.0
"""Timeout of a connection attempt; without a timeout, one lost packet could delay the attempt for much longer."""
RESPONSE_SECONDS = 2.0
"""Timeout of each call of `StaticSampler`. A sampler that exceeds it counts as unreachable."""
_log = structlog.get_logger('fleet')


class ReplicaChannels:
    """Opens one channel to each replica address that is used; `keep_only` closes channels.

    The channels have no interceptors and no retries.
    """

    def __init__(self, tls: TlsConfig) -> None:
        self._tls = tls
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def connected(self, address: str) -> grpc.aio.Channel:
        """Return the connected channel to an address.

        Raises:
            ReplicaNotReached: the connection failed or took longer than `CONNECT_SECONDS`.
        """
        if (channel := self._channels.get(address)) is None:
            channel = open_forwarding_channel(address, tls=self._tls, service='sampler')
            self._channels[address] = channel
        if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            await _connect(channel)
        return channel

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to all addresses that are not in `addresses`."""
        for address in [address for address in self._channels if address not in addresses]:
            await self._channels.pop(address).close()

    async def close(self) -> None:
        await self.keep_only(())


async def _connect(channel: grpc.aio.Channel) -> None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state in {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN}:
                    raise ReplicaNotReached('sampler')
                await channel.wait_for_state_change(state)
    except (TimeoutError, grpc.aio.UsageError) as error:
        # A UsageError means that the address left the fleet and the channel was closed during the attempt.
        raise ReplicaNotReached('sampler') from error


class StaticSampler:
    """Polls the sampler that the configuration names, because such a sampler sends no reports itself.

    `report` contains the values that the configuration defines. Calls on `channel` are authenticated as the gateway's.
    """

    def __init__(self, report: ReplicaReport, *, channel: grpc.aio.Channel) -> None:
        self._report = report
        self._server = server_service_pb2_grpc.ServerServiceStub(channel)
        self._sampler = sampler_service_pb2_grpc.SamplerServiceStub(channel)

    async def run(self, membership: Membership) -> Never:
        """Update the fleet, in which the sampler is registered, about every second until cancelled.

        A sampler that cannot be reached is marked lost.
        """
        while True:
            try:
                with call_errors('sampler'):
                    report = replace(self._report, base_models=await self._base_models(), load=await self._load())
                membership.renew(report)
            except DomainError as error:
                _log.info('static sampler unreachable', replica=self._report.replica_id, reason=error.reason)
                membership.fleet.mark_lost(self._report.replica_id)
            await asyncio.sleep(1.0)

    async def _base_models(self) -> tuple[str, ...]:
        response = await self._server.GetServerInfo(server_service_pb2.GetServerInfoRequest(), timeout=RESPONSE_SECONDS)
        return tuple(
            model.base_model for info in response.services for model in info.base_models if model.is_sampleable
        )

    async def _load(self) -> ReplicaLoad | None:
        try:
            response = await self._sampler.GetLoad(sampler_service_pb2.GetLoadRequest(), timeout=RESPONSE_SECONDS)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise
        return load_from_proto(response.load)


async def is_this_host(host: str) -> bool:
    """Return whether a host name or address belongs to this machine; False for a name that cannot be resolved."""
    try:
        found = await asyncio.get_running_loop().getaddrinfo(host, 0, type=socket.SOCK_DGRAM)
    except OSError:
        return False
    return any(_is_local(family, address) for family, _, _, _, address in found)


def _is_local(family: int, address: tuple[Any, ...]) -> bool:
    # Only a local address can be bound, and binding a datagram socket sends nothing.
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind(address)
        except OSError:
            return False
    return True
