"""Channels to replicas, by address: opened when first needed, closed when the fleet has forgotten the address."""

import asyncio
from collections.abc import Collection

import grpc

from services.gateway.errors import ReplicaNotReached
from services.kit.rpc.channel import open_forwarding_channel
from services.kit.tls import TlsConfig

CONNECT_SECONDS = 5.0
"""How long a connection may take to be made; a packet that nobody answers would be waited for much longer."""


class ReplicaChannels:
    """Bare channels: no interceptor, no retries."""

    def __init__(self, tls: TlsConfig | None = None) -> None:
        """Begin with none; `tls` is the gateway's, unset: plaintext."""
        self._tls = tls or TlsConfig()
        self._channels: dict[str, grpc.aio.Channel] = {}

    async def connected(self, address: str) -> grpc.aio.Channel:
        """Return the channel to an address, connected.

        Raises:
            ReplicaNotReached: nobody listens there now.
        """
        channel = self._channels.get(address)
        if channel is None:
            channel = open_forwarding_channel(address, tls=self._tls, service='sampler')
            self._channels[address] = channel
        if channel.get_state(try_to_connect=True) is not grpc.ChannelConnectivity.READY:
            await _connect(channel)
        return channel

    async def keep_only(self, addresses: Collection[str]) -> None:
        """Close the channels to all other addresses."""
        for address in [address for address in self._channels if address not in addresses]:
            await self._channels.pop(address).close()

    async def close(self) -> None:
        """Close all of them."""
        await self.keep_only(())


async def _connect(channel: grpc.aio.Channel) -> None:
    try:
        async with asyncio.timeout(CONNECT_SECONDS):
            while (state := channel.get_state(try_to_connect=True)) is not grpc.ChannelConnectivity.READY:
                if state in {grpc.ChannelConnectivity.TRANSIENT_FAILURE, grpc.ChannelConnectivity.SHUTDOWN}:
                    raise ReplicaNotReached('sampler')
                await channel.wait_for_state_change(state)
    except (TimeoutError, grpc.aio.UsageError) as error:
        # Too late, or the fleet has forgotten the address meanwhile and the channel was closed.
        raise ReplicaNotReached('sampler') from error
