"""Operations on replicas: register, lease, drain, list and watch."""

import asyncio
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, replace
from datetime import timedelta

import structlog

from twinkle_services.gateway.config import FleetConfig
from twinkle_services.gateway.errors import ReplicaNotFound
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.rules import Replica, ReplicaReport, ReplicaState, weight_sources
from twinkle_services.kit.caller import Caller, require_internal, require_scope
from twinkle_services.kit.config import host_of, is_loopback
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.paging import Page

_log = structlog.get_logger('fleet')


@dataclass(frozen=True, kw_only=True)
class LeaseTerms:
    """Response to each report of a replica."""

    duration: timedelta
    """Maximum time between two reports of the replica."""
    is_drain_requested: bool
    weight_source_address: str
    """Sampler to fetch weights from; empty for the checkpoint service."""


@dataclass(frozen=True, kw_only=True)
class FleetEvent:
    """One event of a watch: a replica, the id of a replica that left, or neither at the end of the snapshot."""

    resume_token: str
    replica: Replica | None = None
    left_replica_id: str = ''


class Replicas:
    """Adds replicas to the fleet, renews their leases, and lists them for operators.

    `register` and `lease` raise InternalOnly if the caller is not a service of this deployment. All other methods raise
    ScopeMissing if the caller is not an operator.

    Args:
        options: the lease of a replica, and the number of samplers to which each sampler relays weights.
        checkpoint_address: 'host:port' of the checkpoint service; empty without a checkpoint service.
        is_this_host: returns whether a host name or address belongs to this machine.
    """

    def __init__(
        self,
        membership: Membership,
        options: FleetConfig,
        *,
        checkpoint_address: str,
        is_this_host: Callable[[str], Awaitable[bool]],
    ) -> None:
        self._membership = membership
        self.lease_duration = options.lease
        self._relay_fan_out = options.relay_fan_out
        self._checkpoint_address = checkpoint_address
        self._is_this_host = is_this_host
        self._watch_epoch = new_id('fl')

    async def register(self, caller: Caller, report: ReplicaReport) -> str:
        """Add a replica to the fleet, and return the address of the checkpoint service for it.

        The address is empty if the service is not deployed, or if the replica cannot reach it. Idempotency: the same
        replica may register again.
        """
        require_internal(caller)
        self._membership.fleet.register(report)
        return await self._checkpoint_address_for(report)

    async def lease(self, caller: Caller, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[LeaseTerms, None]:
        """Keep a replica in the fleet while its reports arrive; yield the terms after each report.

        When `reports` end, a draining replica leaves the fleet; any other replica is marked lost.

        Raises:
            ReplicaNotFound: the replica must register first, or the reports name different replicas.
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
                yield self._terms_for(self._membership.renew(report))
        finally:
            self._membership.fleet.end_lease(replica_id, number)

    async def drain(self, caller: Caller, replica_id: str) -> Replica:
        """Stop sending requests to a replica; the next lease terms instruct the replica to drain.

        Idempotency: draining again has no effect.

        Raises:
            ReplicaNotFound: no replica has this id, or it is lost.
        """
        require_scope(caller, 'operator')
        return self._membership.fleet.drain(replica_id)

    async def list(self, caller: Caller, page: Page) -> tuple[list[Replica], tuple[str] | None]:
        """Return one page of replicas, sorted by id, and the sort key of its last item; no key on the last page."""
        require_scope(caller, 'operator')
        found = sorted(self._membership.fleet.replicas(), key=lambda replica: replica.replica_id)
        if page.after is not None:
            found = [item for item in found if (item.replica_id,) > page.after]
        items = found[: page.size]
        return items, (items[-1].replica_id,) if len(found) > page.size else None

    async def watch(self, caller: Caller, resume_token: str) -> AsyncGenerator[FleetEvent, None]:
        """Yield all replicas, an event with only a token, and then changes; with `resume_token`, only later changes.

        A slow watcher receives only the latest state of each replica. The stream ends when the gateway begins to stop.

        Raises:
            InvalidField: the token is malformed, was issued before a restart, or is too old, because many replicas have
                left since then. A watch that is not read for a long time can fail in the same way.
        """
        require_scope(caller, 'operator')
        fleet = self._membership.fleet
        revision = self._revision_of(resume_token) if resume_token else fleet.revision
        if not resume_token:
            for replica in fleet.changes_after(0)[0]:
                yield FleetEvent(resume_token='', replica=replica)
            yield FleetEvent(resume_token=self._token(revision))
        while True:
            await self._membership.wait_for_change(revision)
            if self._membership.is_closing.is_set():
                return
            if revision < fleet.oldest_revision:
                raise _token_expired()
            (changed, left), now = fleet.changes_after(revision), fleet.revision
            # Only the last event has the new token, so that a watch that resumes between these events misses none.
            before, revision = self._token(revision), now
            events = [FleetEvent(resume_token=before, left_replica_id=replica_id) for replica_id in left]
            events += [FleetEvent(resume_token=before, replica=replica) for replica in changed]
            for event in events[:-1]:
                yield event
            for event in events[-1:]:
                yield replace(event, resume_token=self._token(now))

    async def _checkpoint_address_for(self, report: ReplicaReport) -> str:
        """Return the checkpoint service's address; empty if it is a loopback address that the replica cannot reach."""
        if not is_loopback(self._checkpoint_address) or await self._is_this_host(host_of(report.address)):
            return self._checkpoint_address
        _log.warning(
            'checkpoint address is a loopback address that a replica on another host cannot reach; '
            'set fleet.checkpoint_address of the gateway, or checkpoint_address of the replica',
            replica=report.replica_id,
            replica_address=report.address,
            checkpoint_address=self._checkpoint_address,
        )
        return ''

    async def _until_closing(self, reports: AsyncIterator[ReplicaReport]) -> AsyncGenerator[ReplicaReport, None]:
        """Yield the reports that arrive before the gateway begins to stop."""
        closing = asyncio.ensure_future(self._membership.is_closing.wait())
        try:
            while True:
                pending = asyncio.ensure_future(anext(reports, None))
                try:
                    await asyncio.wait({pending, closing}, return_when=asyncio.FIRST_COMPLETED)
                    report = await pending if pending.done() else None
                finally:
                    pending.cancel()
                if report is None:
                    return
                yield report
        finally:
            closing.cancel()

    def _terms_for(self, replica: Replica) -> LeaseTerms:
        sources = weight_sources(self._membership.fleet.replicas(), fan_out=self._relay_fan_out)
        return LeaseTerms(
            duration=self.lease_duration,
            is_drain_requested=replica.state is ReplicaState.DRAINING,
            weight_source_address=sources.get(replica.replica_id, ''),
        )

    def _token(self, revision: int) -> str:
        return f'{self._watch_epoch}.{revision}'

    def _revision_of(self, token: str) -> int:
        epoch, _, number = token.partition('.')
        if epoch != self._watch_epoch or not number.isascii() or not number.isdigit() or len(number) > 18:
            raise _token_expired()
        revision = int(number)
        if not self._membership.fleet.oldest_revision <= revision <= self._membership.fleet.revision:
            raise _token_expired()
        return revision


def _token_expired() -> InvalidField:
    return InvalidField('resume_token', 'is too old or was issued before a restart; start with an empty one')
