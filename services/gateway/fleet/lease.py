"""The verb by which a replica stays in the fleet."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator
from dataclasses import dataclass
from datetime import timedelta

from services.gateway.errors import ReplicaNotFound
from services.gateway.fleet.membership import Membership
from services.gateway.fleet.rules import Replica, ReplicaReport, ReplicaState, weight_sources
from services.kit.authority import require_internal
from services.kit.caller import Caller


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What the fleet wants of a replica."""

    lease: timedelta
    """Report at least this often."""
    is_drain_requested: bool
    weight_source_address: str
    """Empty: the checkpoint service."""


class Lease:
    """Keeps a replica in the fleet while its reports come."""

    def __init__(self, membership: Membership, *, duration: timedelta, relay_fan_out: int) -> None:
        """Renew in `membership` for `duration`; each sampler relays weights to `relay_fan_out` others, 0: to none."""
        self._membership = membership
        self.duration = duration
        self._fan_out = relay_fan_out

    async def __call__(self, caller: Caller, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[Wish, None]:
        """Yield a wish for each report. When `reports` end the replica is lost, or has left if it was draining.

        Raises:
            ScopeMissing: the caller is no service of this deployment.
            ReplicaNotFound: the replica has to register first, or the stream changed its mind about who it is.
        """
        require_internal(caller)
        replica_id, number = '', 0
        try:
            async for report in self._until_closing(reports):
                if not replica_id:
                    number = self._membership.fleet.begin_lease(report.replica_id)
                    replica_id = report.replica_id
                elif report.replica_id != replica_id:
                    raise ReplicaNotFound(report.replica_id)
                yield self._wish(self._membership.renew(report))
        finally:
            self._membership.end_lease(replica_id, number)

    async def _until_closing(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[ReplicaReport, None]:
        """Yield the reports that come before the gateway is about to stop."""
        closing = asyncio.ensure_future(self._membership.is_closing.wait())
        try:
            while True:
                coming = asyncio.ensure_future(_next(reports))
                try:
                    await asyncio.wait({coming, closing}, return_when=asyncio.FIRST_COMPLETED)
                    report = await coming if coming.done() else None
                finally:
                    coming.cancel()
                if report is None:
                    return
                yield report
        finally:
            closing.cancel()

    def _wish(self, replica: Replica) -> Wish:
        sources = weight_sources(self._membership.fleet.replicas(), fan_out=self._fan_out) if self._fan_out else {}
        return Wish(
            lease=self.duration,
            is_drain_requested=replica.state is ReplicaState.DRAINING,
            weight_source_address=sources.get(replica.replica_id, ''),
        )


async def _next(reports: AsyncIterator[ReplicaReport]) -> ReplicaReport | None:
    return await anext(reports, None)
