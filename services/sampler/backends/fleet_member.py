"""What a sampler in a fleet does beside serving: it keeps its leases, and leaves in good order."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import asynccontextmanager

import grpc

from services.kit.rpc.server import RpcServer
from services.sampler.application.admission import Admission
from services.sampler.application.membership import Membership


class FleetMember:
    """A membership with all that has to happen when it ends."""

    def __init__(
        self, membership: Membership, server: RpcServer, admission: Admission, channels: Sequence[grpc.aio.Channel]
    ) -> None:
        """Own `channels`, through which `membership` reports what `server` and `admission` do."""
        self._membership = membership
        self._server = server
        self._admission = admission
        self._channels = channels

    @asynccontextmanager
    async def serving(self, stopping: asyncio.Event) -> AsyncGenerator[None, None]:
        """Be part of the fleet within this block; see `Membership.serving`."""
        async with self._membership.serving(stopping, self._finish):
            yield

    async def close(self) -> None:
        """Leave the fleet."""
        await self._membership.close()
        for channel in self._channels:
            await channel.close()

    async def _finish(self) -> None:
        """Say that nothing new is wanted, and wait until what runs is done."""
        await self._server.say_not_serving()
        await self._admission.wait_idle()
