"""Background jobs of the fleet: expire leases, and poll the static sampler."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import aclosing
from datetime import timedelta
from typing import Never

import structlog

from services.gateway.fleet.grpc import ReplicaChannels, StaticSampler
from services.gateway.fleet.members import Membership
from services.kit.errors import DomainError

_log = structlog.get_logger('fleet')


class ExpireLeases:
    """Marks silent replicas as lost, and closes connections to removed ones."""

    def __init__(self, membership: Membership, *, channels: ReplicaChannels) -> None:
        self._membership = membership
        self._channels = channels

    async def keep_on(self, *, interval: timedelta, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Sweep every `interval` until cancelled."""
        while True:
            await pause(interval.total_seconds())
            self._membership.expire()
            await self._channels.keep_only(self._membership.addresses_in_use())


class FollowStatic:
    """Registers the static sampler at once, and updates the fleet with its reports."""

    def __init__(self, membership: Membership, sampler: StaticSampler) -> None:
        self._membership = membership
        self._sampler = sampler
        self._replica_id = sampler.report.replica_id
        membership.register(sampler.report, is_static=True)

    async def keep_on(self, *, pause: Callable[[float], Awaitable[None]] = asyncio.sleep) -> Never:
        """Poll until cancelled. A sampler that cannot be reached is lost, and is polled again after a second."""
        while True:
            try:
                async with aclosing(self._sampler.follow()) as reports:
                    async for report in reports:
                        self._membership.renew(report)
            except DomainError as error:
                _log.info('static sampler unreachable', replica=self._replica_id, reason=error.reason)
            self._membership.lose(self._replica_id)
            await pause(1.0)
