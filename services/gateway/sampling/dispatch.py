"""The steps that all sampling verbs share: find a replica, go on after one failed, wait for one to come."""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import structlog

from services.gateway.errors import CheckpointStreamLost, NoReplica
from services.gateway.fleet.members import Membership
from services.gateway.fleet.routing import RouteKey, candidates
from services.gateway.fleet.rules import Replica
from services.gateway.sampling.failover import MOST_BAD_ENDS, Attempt, Verdict, verdict_on
from services.gateway.sampling.fair_shares import equal_weight
from services.gateway.sampling.turns import Place, Turns
from services.kit.errors import BaseModelNotFound, DeadlinePassed, DomainError, Draining, ServiceUnreachable

_log = structlog.get_logger('dispatch')
_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 1.0
_MOST_DOUBLINGS = 10


class Dispatch:
    """Finds replicas for requests."""

    def __init__(
        self,
        membership: Membership,
        *,
        replica_wait: timedelta,
        begin_wait: timedelta,
        waiting_per_tenant: int = 1024,
        weight_of: Callable[[str], float] = equal_weight,
    ) -> None:
        """Choose replicas.

        Args:
            membership: whom to choose from.
            replica_wait: how long an answer that was begun waits for one.
            begin_wait: how long a new request does.
            waiting_per_tenant: requests of a tenant that may wait for a replica that is busy.
            weight_of: returns a tenant's weight as it is now, above 0, by which turns at a replica are shared.
        """
        self.membership = membership
        self._turns = Turns(waiting_per_tenant=waiting_per_tenant, weight_of=weight_of)
        membership.on_change(lambda: self._turns.keep_only(membership.ready_ids()))
        self._wait_seconds = replica_wait.total_seconds()
        self._begin_seconds = begin_wait.total_seconds()

    async def find(self, attempt: Attempt) -> Replica:
        """Return the replica to try next.

        Where none is left a request waits for one: a new one for a moment, one that was begun longer. A new one
        does not where all refused it, or where there was never anybody who could come back.

        Raises:
            NoReplica: there is none, or none came in time.
            BaseModelNotFound: replicas there are, none of them for this base model.
            DeadlinePassed: the caller waits no longer.
            Draining: there is none, and this gateway is about to stop.
            DomainError: how the last sampler refused it, where all did.
        """
        while True:
            if replica := self.membership.find_for(attempt.key, excluded=attempt.tried):
                return replica
            if not self._is_worth_waiting(attempt):
                raise self._refusal(attempt)
            await self._wait(attempt)
            attempt.tried.clear()

    @contextmanager
    def place(self, replica: Replica, attempt: Attempt, weight: int) -> Iterator[Place]:
        """Have a place for `weight` sequences at a replica during the block, which count as running there."""
        with (
            self.membership.working(replica, weight),
            self._turns.place(replica, attempt.tenant_id, weight) as place,
        ):
            yield place

    def failed(self, attempt: Attempt, replica: Replica, error: DomainError) -> None:
        """Take note that a replica failed with a request; return where another one may be tried.

        Raises:
            DomainError: `error`, where the caller is to hear it.
        """
        verdict = verdict_on(error, is_begun=attempt.is_begun)
        if verdict is Verdict.FINAL:
            raise error
        attempt.is_answering = False
        attempt.tried.add(replica.replica_id)
        attempt.refusal = error if verdict is Verdict.REFUSED else None
        attempt.bad_ends += verdict is Verdict.BROKEN
        if isinstance(error, ServiceUnreachable) or error.reason == 'SERVICE_UNREACHABLE':
            self.membership.fleet.note_failure(replica.replica_id)
        _log.info('sampler failed', replica=replica.replica_id, reason=error.reason, verdict=verdict.value)
        if attempt.is_bound:
            raise CheckpointStreamLost('sampler') from error
        if attempt.bad_ends >= MOST_BAD_ENDS:
            raise error

    def missing(self, key: RouteKey) -> DomainError:
        """Return the error that says that nobody is there for a request."""
        known = {name for item in self.membership.fleet.replicas() for name in item.report.base_models}
        serving = self.membership.fleet.serving('sampler')
        if serving and key.base_model not in known and not candidates(key, serving):
            return BaseModelNotFound(key.base_model, tuple(sorted(known)))
        return NoReplica('sampler', key.base_model)

    def _is_worth_waiting(self, attempt: Attempt) -> bool:
        if attempt.is_begun:
            return True
        if attempt.refusal is not None and attempt.refusal.reason != Draining.reason:
            return False
        was_anybody_there = self.membership.fleet.revision > 0
        return was_anybody_there and isinstance(self.missing(attempt.key), NoReplica)

    def _refusal(self, attempt: Attempt) -> DomainError:
        return attempt.refusal or self.missing(attempt.key)

    async def _wait(self, attempt: Attempt) -> None:
        """Wait for a change of the fleet; where there is somebody to try again, only for a moment.

        Raises:
            DomainError: as `find`.
        """
        if self.membership.is_closing.is_set():
            # No change is told any more: whoever asks again does so elsewhere, or after the restart.
            raise Draining()
        now = asyncio.get_running_loop().time()
        if attempt.give_up_at is None:
            attempt.give_up_at = now + (self._wait_seconds if attempt.is_begun else self._begin_seconds)
        if attempt.deadline is not None and now >= attempt.deadline:
            raise DeadlinePassed()
        if now >= attempt.give_up_at:
            raise self._refusal(attempt)
        seconds = min(attempt.give_up_at, attempt.deadline or attempt.give_up_at) - now
        if self.membership.find_for(attempt.key, excluded=frozenset()) is not None:
            seconds = min(seconds, _FIRST_WAIT_SECONDS * 2**attempt.wait_count, _LONGEST_WAIT_SECONDS)
        attempt.wait_count = min(attempt.wait_count + 1, _MOST_DOUBLINGS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.membership.wait_for_change(self.membership.fleet.revision)
