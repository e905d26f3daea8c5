"""A fleet member that renews its leases while it serves, and drains before it leaves."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import grpc

from twinkle_services.kit.rpc.server import RpcServer
from twinkle_services.sampler.application.membership import Membership
from twinkle_services.sampler.application.replica import Replica


class FleetMember:
    """Connects a membership to the server, which reports NOT_SERVING when a gateway requests a drain."""

    def __init__(
        self, membership: Membership, server: RpcServer, replica: Replica, channels: Sequence[grpc.aio.Channel]
    ) -> None:
        """Create a member.

        Args:
            membership: Leases with the gateways.
            server: Server of this sampler.
            replica: State of this sampler.
            channels: Channels of `membership` to the gateways; `close` closes them.
        """
        self._membership = membership
        self._server = server
        self._replica = replica
        self._channels = channels

    @asynccontextmanager
    async def serving(self, stopping: asyncio.Event) -> AsyncGenerator[None, None]:
        """Join the fleet for the duration of the block; see `Membership.serving`."""
        async with self._membership.serving(stopping, self._finish):
            yield

    async def close(self) -> None:
        """Stop reporting and close the channels."""
        await self._membership.close()
        for channel in self._channels:
            await channel.close()

    async def _finish(self) -> None:
        """Report NOT_SERVING, and wait until all running requests are done."""
        await self._server.report_not_serving()
        await self._replica.wait_idle()
