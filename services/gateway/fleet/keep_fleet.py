"""The jobs that keep the fleet true: whoever is silent is lost, and members of the configuration are asked."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.fleet.membership import Membership
from services.gateway.fleet.ports import Connections, SamplerFacts
from services.gateway.fleet.rules import ReplicaReport
from services.kit.errors import DomainError

_log = structlog.get_logger('fleet')


class ExpireLeases:
    """Loses members whose lease has run out, and lets go of connections to those that are forgotten."""

    def __init__(self, membership: Membership, *, channels: Connections) -> None:
        """Sweep `membership` and `channels`."""
        self._membership = membership
        self._channels = channels

    async def keep_on(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled."""
        while True:
            await pause(interval.total_seconds())
            self._membership.expire()
            await self._channels.keep_only(self._membership.addresses_in_use())


class FollowStatic:
    """Asks a member of the configuration how it is, since it holds no lease."""

    def __init__(self, membership: Membership, facts: SamplerFacts, *, report: ReplicaReport) -> None:
        """Take the member in at once, as `report` has it, and follow it through `facts`."""
        self._membership = membership
        self._facts = facts
        self._replica_id = report.replica_id
        membership.register(report, is_static=True)

    async def keep_on(self, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Follow until cancelled; a member that cannot be reached is lost, and asked again a second later."""
        while True:
            try:
                async with aclosing(self._facts.follow()) as reports:
                    async for report in reports:
                        self._membership.renew(report)
            except DomainError as error:
                _log.info('sampler of the configuration is out of reach', reason=error.reason)
            self._membership.lose(self._replica_id)
            await pause(1.0)
