"""Failover of sampling requests: which errors lead to another replica, and how long a request waits for one.

`fleet.sampler_choice` chooses the replica.
"""

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from enum import Enum

import structlog

from twinkle_services.gateway.errors import CheckpointStreamLost, NoReplica, ReplicaNotReached, RequestCrashed
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.rules import Replica
from twinkle_services.gateway.fleet.sampler_choice import RouteKey, candidates
from twinkle_services.gateway.sampling.slots import ReplicaSlots, Slot, equal_weight
from twinkle_services.gateway.sampling.suspects import MAX_CONSECUTIVE_FAILURES, Attempt, Suspects
from twinkle_services.kit.errors import (
    BaseModelNotFound,
    Code,
    DeadlinePassed,
    Disposition,
    DomainError,
    Draining,
    ServiceUnreachable,
)

_TRANSIENT_WHEN_STARTED = frozenset({'ID_TAKEN', 'VERSION_NOT_READY'})
"""Errors that are temporary once a request has started: an earlier attempt still runs, or the version is missing."""
_FIRST_WAIT_SECONDS = 0.05
_LONGEST_WAIT_SECONDS = 1.0
_MAX_DOUBLINGS = 10

_log = structlog.get_logger('dispatch')


class Verdict(Enum):
    """Meaning of a sampler's error for the request."""

    FINAL = 'final'
    """The caller receives the error."""
    REFUSED = 'refused'
    """Another sampler may accept the request; if no sampler does, the caller receives the refusal."""
    BROKEN = 'broken'
    """The sampler failed while it ran the request."""
    UNREACHED = 'unreached'
    """The sampler never received the request."""


def verdict_on(error: DomainError, *, is_started: bool) -> Verdict:
    """Return the meaning of a sampler's error; `is_started` is `Attempt.is_started`."""
    if isinstance(error, ReplicaNotReached):
        return Verdict.UNREACHED
    if error.reason == 'SERVICE_UNREACHABLE' or error.disposition is Disposition.UNKNOWN:
        return Verdict.BROKEN
    if error.reason in _TRANSIENT_WHEN_STARTED:
        return Verdict.REFUSED if is_started else Verdict.FINAL
    if error.disposition.is_transient and error.code is not Code.DEADLINE_EXCEEDED:
        return Verdict.REFUSED
    return Verdict.FINAL


class Dispatch:
    """Finds a replica for each request.

    A request waits up to `begin_wait` for a replica, or up to `replica_wait` once it has started. At most
    `waiting_per_tenant` requests of a tenant wait for slots at one busy replica.
    """

    def __init__(
        self,
        membership: Membership,
        *,
        replica_wait: timedelta,
        begin_wait: timedelta,
        waiting_per_tenant: int = 1024,
        weight_of: Callable[[str], float] = equal_weight,
    ) -> None:
        self.membership = membership
        self.suspects = Suspects()
        self.slots = ReplicaSlots(waiting_per_tenant=waiting_per_tenant, weight_of=weight_of)
        membership.on_change(lambda: self.slots.keep_only(membership.ready_ids()))
        self._wait_seconds = replica_wait.total_seconds()
        self._begin_seconds = begin_wait.total_seconds()

    async def find(self, attempt: Attempt) -> Replica:
        """Return the replica to try next.

        A new request does not wait if the last replica refused it (except with DRAINING), if no replica ever
        registered, or if all replicas serve other base models. A request is suspected (see `Suspects`) if several
        samplers in a row failed while they ran it. It first waits for the progress of other requests. Meanwhile, and
        for a short time while the suspected request runs, new requests wait.

        Raises:
            RequestCrashed: too many samplers in a row failed while they ran this request or an earlier equal one.
            NoReplica: no replica is available, and none became available in time.
            BaseModelNotFound: there are replicas, but none serves this base model.
            DeadlinePassed: the deadline passed while the request waited.
            Draining: no replica is available, and this gateway is stopping.
            DomainError: the last sampler's refusal, if all refused.
        """
        attempt.consecutive_failures = max(attempt.consecutive_failures, self.suspects.failures_of(attempt))
        if attempt.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise RequestCrashed(MAX_CONSECUTIVE_FAILURES)
        try:
            while True:
                replica = self.membership.find_for(attempt.key, excluded=attempt.tried)
                if replica is not None and self.suspects.may_run(attempt):
                    return replica
                await self._wait_for(replica, attempt)
        except BaseException:
            _end_turn(attempt)
            raise

    async def _wait_for(self, replica: Replica | None, attempt: Attempt) -> None:
        """Wait until a request may run at `replica`, which may leave meanwhile; without a replica, wait for any."""
        if replica is not None:
            try:
                async with asyncio.timeout_at(attempt.deadline):
                    await self.suspects.wait(attempt, replica.replica_id)
            except TimeoutError as error:
                raise DeadlinePassed() from error
            return
        if not self._is_worth_waiting(attempt):
            raise self._refusal(attempt)
        await self._wait(attempt)
        attempt.tried.clear()

    @contextmanager
    def reserve(self, replica: Replica, attempt: Attempt, sequence_count: int) -> Iterator[Slot]:
        """Reserve a slot, as `ReplicaSlots.reserve` does, and count the sequences as running while the block runs."""
        with (
            self.membership.track_sequences(replica, sequence_count),
            self.slots.reserve(replica, attempt.tenant_id, sequence_count) as slot,
            self.suspects.track(replica.replica_id, attempt, slot),
        ):
            yield slot

    @contextmanager
    def track(self, replica: Replica, attempt: Attempt) -> Iterator[None]:
        """Count a call without sequences, which needs no slot, as running on a replica while the block runs."""
        slot = Slot(attempt.tenant_id, 0, is_granted=True)
        with self.membership.track_sequences(replica, 0), self.suspects.track(replica.replica_id, attempt, slot):
            yield

    def record_success(self, attempt: Attempt, replica: Replica, *, has_tokens: bool) -> None:
        """Record a response of a replica, with or without a token."""
        self.membership.fleet.note_success(replica.replica_id)
        attempt.advance(has_tokens=has_tokens)
        if has_tokens:
            _end_turn(attempt)
            self.suspects.record_progress(attempt, replica.replica_id)

    def record_failure(self, attempt: Attempt, replica: Replica, error: DomainError) -> None:
        """Record that a request failed at a replica; return if another replica may be tried.

        Raises:
            DomainError: `error`, if the caller must receive it.
            CheckpointStreamLost: only this replica could continue the response.
            RequestCrashed: too many samplers in a row failed while they ran this request.
        """
        _end_turn(attempt)
        verdict = verdict_on(error, is_started=attempt.is_started)
        if verdict is Verdict.FINAL:
            raise error
        # If the sampler reports that another service is unreachable, the request is not the cause.
        is_lost = verdict is Verdict.BROKEN and error.metadata().get('service') == 'sampler'
        blame = self.suspects.blame(attempt, replica) if is_lost else float(verdict is Verdict.BROKEN)
        attempt.is_delivering = False
        attempt.tried.add(replica.replica_id)
        attempt.refusal = error if verdict is Verdict.REFUSED else None
        attempt.consecutive_failures += blame
        if isinstance(error, ServiceUnreachable) or error.reason == 'SERVICE_UNREACHABLE':
            self.membership.fleet.note_failure(replica.replica_id)
        if is_lost:
            self.suspects.record_failure(attempt)
        _log.info('sampler failed', replica=replica.replica_id, reason=error.reason, verdict=verdict.value)
        if attempt.is_bound:
            raise CheckpointStreamLost('sampler') from error
        if attempt.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            if is_lost:
                raise RequestCrashed(MAX_CONSECUTIVE_FAILURES) from error
            raise error

    def unavailable(self, key: RouteKey) -> DomainError:
        """Return the error for a request that no replica can serve at the moment."""
        known = {name for item in self.membership.fleet.replicas() for name in item.report.base_models}
        serving = self.membership.fleet.serving('sampler')
        if serving and key.base_model not in known and not candidates(key, serving):
            return BaseModelNotFound(key.base_model, tuple(sorted(known)))
        return NoReplica('sampler', key.base_model)

    def _is_worth_waiting(self, attempt: Attempt) -> bool:
        if attempt.is_started:
            return True
        if attempt.refusal is not None and attempt.refusal.reason != Draining.reason:
            return False
        return self.membership.fleet.revision > 0 and isinstance(self.unavailable(attempt.key), NoReplica)

    def _refusal(self, attempt: Attempt) -> DomainError:
        return attempt.refusal or self.unavailable(attempt.key)

    async def _wait(self, attempt: Attempt) -> None:
        """Wait for a change of the fleet, or for a short time if replicas can be tried again."""
        if self.membership.is_closing.is_set():
            # The membership reports no further changes: the client retries at another gateway or after the restart.
            raise Draining()
        now = asyncio.get_running_loop().time()
        if attempt.give_up_at is None:
            attempt.give_up_at = now + (self._wait_seconds if attempt.is_started else self._begin_seconds)
        if attempt.deadline is not None and now >= attempt.deadline:
            raise DeadlinePassed()
        if now >= attempt.give_up_at:
            raise self._refusal(attempt)
        seconds = min(attempt.give_up_at, attempt.deadline or attempt.give_up_at) - now
        if self.membership.find_for(attempt.key, excluded=frozenset()) is not None:
            seconds = min(seconds, _FIRST_WAIT_SECONDS * 2**attempt.wait_count, _LONGEST_WAIT_SECONDS)
        attempt.wait_count = min(attempt.wait_count + 1, _MAX_DOUBLINGS)
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self.membership.wait_for_change(self.membership.fleet.revision)


def _end_turn(attempt: Attempt) -> None:
    if attempt.turn is not None:
        attempt.turn.end()
        attempt.turn = None
