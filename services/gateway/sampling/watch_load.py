"""How busy the fleet of samplers is, again and again."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import suppress
from datetime import timedelta

from services.gateway.fleet.members import Membership
from services.gateway.fleet.rules import ReplicaLoad
from services.gateway.sampling.get_load import GetLoad
from services.kit.caller import Caller


class WatchLoad:
    """Tells the load again and again."""

    def __init__(self, get_load: GetLoad, membership: Membership) -> None:
        """Ask `get_load`, until `membership` is about to close."""
        self._get_load = get_load
        self._is_closing = membership.is_closing

    async def __call__(self, caller: Caller, interval: timedelta) -> AsyncGenerator[ReplicaLoad, None]:
        """Yield the load now and after every `interval`; it ends when the gateway is about to stop.

        Raises:
            DomainError: as `GetLoad`.
        """
        while not self._is_closing.is_set():
            yield await self._get_load(caller)
            with suppress(TimeoutError):
                async with asyncio.timeout(interval.total_seconds()):
                    await self._is_closing.wait()
