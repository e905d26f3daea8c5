"""Failover of sampling requests: which errors lead to another replica, and how long a request waits for one.

`fleet.routing` chooses the replica.
"""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum

import structlog

from services.gateway.errors import CheckpointStreamLost, NoReplica, ReplicaNotReached, RequestCrashed
from services.gateway.fleet.members import Membership
from services.gateway.fleet.routing import RouteKey, candidates
from services.gateway.fleet.rules import Replica
from services.gateway.sampling.slots import ReplicaSlots, Slot, equal_weight
from services.kit.errors import (
    BaseModelNotFound,
    Code,
    DeadlinePassed,
    Disposition,
    DomainError,
    Draining,
    ServiceUnreachable,
)

MAX_CONSECUTIVE_FAILURES = 3
"""Number of samplers that may fail in a row without a new token before the request fails: it may be the cause."""
SUSPECTED_FAILURES = 2
"""Number of samplers that failed in a row after which a request no longer runs beside other such requests."""
SUSPECT_SECONDS = 600.0
"""Time for which the failures of a request count if a client sends it again."""
_ALONE_SECONDS = 3.0
"""Maximum time for which a suspected request keeps others from running; crashes occur early."""
_MAX_SUSPECTS = 4096
_TRANSIENT_WHEN_STARTED = frozenset({'ID_TAKEN', 'VERSION_NOT_READY'})
"""Temporary errors of a started request on another replica: its previous attempt still runs, or its version has not
arrived."""
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
    """Return the meaning of a sampler's error.

    Args:
        error: Error of the sampler, or ServiceUnreachable if the connection failed.
        is_started: Whether part of the response was delivered.
    """
    if isinstance(error, ReplicaNotReached):
        return Verdict.UNREACHED
    if error.reason == 'SERVICE_UNREACHABLE' or error.disposition is Disposition.UNKNOWN:
        return Verdict.BROKEN
    if error.reason in _TRANSIENT_WHEN_STARTED:
        return Verdict.REFUSED if is_started else Verdict.FINAL
    if error.disposition.is_transient and error.code is not Code.DEADLINE_EXCEEDED:
        return Verdict.REFUSED
    return Verdict.FINAL


@dataclass(kw_only=True)
class Attempt:
    """State of a request while the fleet runs it."""

    key: RouteKey
    tenant_id: str = ''
    """Tenant that sent the request."""
    message: bytes = b''
    """The serialized request, which identifies it if a client sends it again; empty if it is not recognised."""
    request_id: str = ''
    """Id in the message, which may differ when a client sends the request again."""
    deadline: float | None = None
    """Time on the event loop's clock; None for no deadline."""
    tried: set[str] = field(default_factory=set[str])
    """Replicas that failed since the request last made progress or waited."""
    is_started: bool = False
    """Whether part of the response was delivered; a started request waits longer for a replica."""
    has_tokens: bool = False
    """Whether a token was delivered."""
    consecutive_failures: int = 0
    """Number of samplers that failed in a row with the request, without a token in between."""
    refusal: DomainError | None = None
    """Refusal of the last replica; None if it failed for another reason."""
    wait_count: int = 0
    """Number of waits for a replica since the request last made progress."""
    is_delivering: bool = False
    """Whether the current replica delivered tokens."""
    give_up_at: float | None = None
    """Time on the event loop's clock at which the request stops waiting; None while it does not wait."""
    turn: 'Turn | None' = None
    """Turn of a suspected request while it runs."""

    @property
    def is_bound(self) -> bool:
        """Whether only the replica that started the response can continue it.

        A checkpoint's path may be overwritten, so that another replica may load other weights.
        """
        return self.has_tokens and self.key.adapter is not None and self.key.adapter.is_checkpoint

    def start(self) -> None:
        """Record that part of the response exists: from now on, the request waits longer for a replica."""
        if not self.is_started:
            self.is_started, self.give_up_at = True, None

    def advance(self, *, has_tokens: bool) -> None:
        """Record that a replica responds, with or without a token."""
        self.start()
        if has_tokens:
            self.is_delivering = self.has_tokens = True
            self.tried.clear()
            self.consecutive_failures, self.wait_count, self.give_up_at = 0, 0, None


class Turn:
    """The turn of a suspected request to run. It ends by itself after some time."""

    def __init__(self, lock: asyncio.Lock) -> None:
        """Wrap the lock, which the caller has acquired."""
        self._lock: asyncio.Lock | None = lock
        self._timer = asyncio.get_running_loop().call_later(_ALONE_SECONDS, self.end)

    def end(self) -> None:
        """Let the next suspected request run."""
        self._timer.cancel()
        if self._lock is not None:
            self._lock.release()
            self._lock = None


class Suspects:
    """Requests that were running on samplers that failed, and that may be the cause.

    A request that crashes samplers would otherwise crash every sampler, as often as clients send it again, and with it
    fail the requests that run beside it. Suspected requests therefore run one after the other, each until its first
    progress. Concurrency: use it from one event loop only.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[bytes, tuple[int, float]] = OrderedDict()
        """Failures in a row, and the time of the last one, by request."""
        self._lock = asyncio.Lock()

    def failures_of(self, attempt: Attempt) -> int:
        """Return the number of samplers that failed in a row with this request."""
        if not self._failures or not attempt.message:
            return 0
        count, time = self._failures.get(_fingerprint(attempt), (0, 0.0))
        return count if asyncio.get_running_loop().time() < time + SUSPECT_SECONDS else 0

    def record_failure(self, attempt: Attempt) -> None:
        """Record the failures of an attempt."""
        if attempt.message:
            name = _fingerprint(attempt)
            count = max(attempt.consecutive_failures, self.failures_of(attempt))
            self._failures[name] = count, asyncio.get_running_loop().time()
            self._failures.move_to_end(name)
            if len(self._failures) > _MAX_SUSPECTS:
                self._failures.popitem(last=False)

    def clear(self, attempt: Attempt) -> None:
        """Record that a sampler made progress with a request."""
        if self._failures and attempt.message:
            self._failures.pop(_fingerprint(attempt), None)

    async def take_turn(self, attempt: Attempt) -> None:
        """Wait until no other suspected request runs."""
        await self._lock.acquire()
        attempt.turn = Turn(self._lock)


def _fingerprint(attempt: Attempt) -> bytes:
    content = attempt.message.replace(attempt.request_id.encode(), b'', 1)
    return hashlib.blake2b(attempt.tenant_id.encode() + b'\0' + content, digest_size=16).digest()


class Dispatch:
    """Finds a replica for each request."""

    def __init__(
        self,
        membership: Membership,
        *,
        replica_wait: timedelta,
        begin_wait: timedelta,
        waiting_per_tenant: int = 1024,
        weight_of: Callable[[str], float] = equal_weight,
    ) -> None:
        """Create a dispatcher over the fleet.

        Args:
            membership: Replicas to choose from.
            replica_wait: Maximum wait for a replica of a request whose response has started.
            begin_wait: Maximum wait for a replica of a new request.
            waiting_per_tenant: Maximum number of requests of a tenant that wait for a busy replica.
            weight_of: Returns a tenant's current weight, above 0, which sets its share of a replica's slots.
        """
        self.membership = membership
        self.suspects = Suspects()
        self.slots = ReplicaSlots(waiting_per_tenant=waiting_per_tenant, weight_of=weight_of)
        membership.on_change(lambda: self.slots.keep_only(membership.ready_ids()))
        self._wait_seconds = replica_wait.total_seconds()
        self._begin_seconds = begin_wait.total_seconds()

    async def find(self, attempt: Attempt) -> Replica:
        """Return the replica to try next.

        Without an available replica, a started request waits longer than a new one. A new request does not wait if all
        replicas refused it, or if no replica was ever registered. A request with which several samplers failed waits
        until other such requests have made progress.

        Raises:
            RequestCrashed: Too many samplers failed in a row with this request, now or when a client sent it before.
            NoReplica: No replica is available, and none became available in time.
            BaseModelNotFound: There are replicas, but none serves this base model.
            DeadlinePassed: The deadline passed while the request waited.
            Draining: No replica is available, and this gateway is stopping.
            DomainError: The last sampler's refusal, if all refused.
        """
        attempt.consecutive_failures = max(attempt.consecutive_failures, self.suspects.failures_of(attempt))
        if attempt.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            raise RequestCrashed(attempt.consecutive_failures)
        while True:
            if replica := self.membership.find_for(attempt.key, excluded=attempt.tried):
                if attempt.consecutive_failures < SUSPECTED_FAILURES or attempt.turn is not None:
                    return replica
                # The replica may be gone when the turn begins.
                await self._take_turn(attempt)
                continue
            if not self._is_worth_waiting(attempt):
                raise self._refusal(attempt)
            await self._wait(attempt)
            attempt.tried.clear()

    @contextmanager
    def reserve(self, replica: Replica, attempt: Attempt, sequence_count: int) -> Iterator[Slot]:
        """Reserve a slot at a replica for the duration of the block, and count its sequences as running there."""
        with (
            self.membership.track_sequences(replica, sequence_count),
            self.slots.reserve(replica, attempt.tenant_id, sequence_count) as slot,
        ):
            yield slot

    def record_success(self, attempt: Attempt, replica: Replica, *, has_tokens: bool) -> None:
        """Record that a replica responds, with or without a token."""
        self.membership.fleet.note_success(replica.replica_id)
        if has_tokens:
            self.suspects.clear(attempt)
            _end_turn(attempt)
        attempt.advance(has_tokens=has_tokens)

    def record_failure(self, attempt: Attempt, replica: Replica, error: DomainError) -> None:
        """Record that a replica failed a request; return if another replica may be tried.

        Raises:
            DomainError: `error`, if the caller must receive it.
            RequestCrashed: Too many samplers failed in a row with this request.
        """
        _end_turn(attempt)
        verdict = verdict_on(error, is_started=attempt.is_started)
        if verdict is Verdict.FINAL:
            raise error
        attempt.is_delivering = False
        attempt.tried.add(replica.replica_id)
        attempt.refusal = error if verdict is Verdict.REFUSED else None
        attempt.consecutive_failures += verdict is Verdict.BROKEN
        if isinstance(error, ServiceUnreachable) or error.reason == 'SERVICE_UNREACHABLE':
            self.membership.fleet.note_failure(replica.replica_id)
        # A service behind the sampler may be unreachable instead, which no request causes.
        is_lost = verdict is Verdict.BROKEN and error.metadata().get('service') == 'sampler'
        if is_lost:
            self.suspects.record_failure(attempt)
        _log.info('sampler failed', replica=replica.replica_id, reason=error.reason, verdict=verdict.value)
        if attempt.is_bound:
            raise CheckpointStreamLost('sampler') from error
        if attempt.consecutive_failures >= MAX_CONSECUTIVE_FAILURES:
            if is_lost:
                raise RequestCrashed(attempt.consecutive_failures) from error
            raise error

    def unavailable(self, key: RouteKey) -> DomainError:
        """Return the error for a request that no replica can serve."""
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
        had_members = self.membership.fleet.revision > 0
        return had_members and isinstance(self.unavailable(attempt.key), NoReplica)

    def _refusal(self, attempt: Attempt) -> DomainError:
        return attempt.refusal or self.unavailable(attempt.key)

    async def _take_turn(self, attempt: Attempt) -> None:
        try:
            async with asyncio.timeout_at(attempt.deadline):
                await self.suspects.take_turn(attempt)
        except TimeoutError as error:
            raise DeadlinePassed() from error

    async def _wait(self, attempt: Attempt) -> None:
        """Wait for a change of the fleet, or for a short time if replicas can be tried again.

        Raises:
            DomainError: See `find`.
        """
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
