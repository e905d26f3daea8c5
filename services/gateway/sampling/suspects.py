"""Requests in flight on samplers, and which of them may have crashed a sampler."""

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field

from twinkle_services.gateway.fleet.rules import Replica
from twinkle_services.gateway.fleet.sampler_choice import RouteKey
from twinkle_services.gateway.sampling.slots import Slot
from twinkle_services.kit.errors import DomainError

MAX_CONSECUTIVE_FAILURES = 3
"""If this many samplers in a row fail while they run a request, and none delivers a token, the request fails, because
it may be the cause. A failure can count less if another request may be the cause, see `Suspects.blame`."""
SUSPECTED_FAILURES = 2
"""A request is suspected if this many samplers in a row failed while they ran it. It then runs only in its turn."""
SUSPECT_SECONDS = 600.0
"""Time for which the failures of a request count if a client sends it again."""
_ALONE_SECONDS = 3.0
"""Maximum time for which a suspected request waits for the requests on its sampler. Its turn ends after twice this time
at the latest, and other requests wait for suspected ones for at most twice this time in total. A few seconds suffice,
because crashes occur early."""
_SENDING_SECONDS = 0.05
"""Time for which a suspected request waits for requests that are about to be sent, before it counts those in flight."""
_LOST_SECONDS = 3.0
"""Time for which further failures of a lost static sampler count as the same loss. The configuration names such a
sampler, so its id does not change when it restarts."""
_SHARED_BLAME = 0.25
"""Weight of the last failure before a request is given up, if another request may be the cause."""
_MAX_SUSPECTS = 4096


@dataclass(kw_only=True)
class Attempt:
    """State of a request while the fleet runs it."""

    key: RouteKey
    tenant_id: str = ''
    """Tenant that sent the request."""
    message: bytes = b''
    """Serialized request, used to recognize a request that a client sends again; empty to recognize none."""
    request_id: str = ''
    """Id in the message, which may differ when a client sends the request again."""
    deadline: float | None = None
    """Time on the event loop's clock; None for no deadline."""
    tried: set[str] = field(default_factory=set[str])
    """Replicas that failed or refused the request since it last made progress or waited."""
    is_started: bool = False
    """Whether a sampler has begun to run the request. If so, the request may wait longer for another sampler."""
    has_tokens: bool = False
    """Whether a token was delivered."""
    consecutive_failures: float = 0
    """Number of samplers that failed in a row with the request, without a token in between; see `Suspects.blame`."""
    begin_time: float = 0.0
    """Time on the event loop's clock at which the current replica received the request."""
    refusal: DomainError | None = None
    """Refusal of the last replica; None if it failed for another reason."""
    wait_count: int = 0
    """Number of waits for a replica since the request last made progress."""
    is_delivering: bool = False
    """Whether the current replica delivered tokens."""
    give_up_at: float | None = None
    """Time on the event loop's clock at which the request stops waiting; None while it does not wait."""
    yields_until: float | None = None
    """Time on the event loop's clock until which the request waits for suspected ones; None before its first wait."""
    turn: 'Turn | None' = None
    """Turn of a suspected request while it runs."""

    @property
    def is_bound(self) -> bool:
        """Whether only the replica that started the response can continue it.

        A checkpoint may be overwritten, so that another replica may load different weights from its path.
        """
        return self.has_tokens and self.key.adapter is not None and self.key.adapter.is_checkpoint

    def start(self) -> None:
        """Record that a sampler has begun to run the request. The request may then wait longer for another sampler."""
        if not self.is_started:
            self.is_started, self.give_up_at = True, None

    def advance(self, *, has_tokens: bool) -> None:
        """Record a response of a replica, with or without a token."""
        self.start()
        if has_tokens:
            self.is_delivering = self.has_tokens = True
            self.tried.clear()
            self.consecutive_failures, self.wait_count, self.give_up_at = 0, 0, None


class Turn:
    """The turn of a suspected request to run. It ends after a few seconds at the latest, and then releases `lock`."""

    def __init__(self, lock: asyncio.Lock) -> None:
        self._lock = lock
        self._timer = asyncio.get_running_loop().call_later(2 * _ALONE_SECONDS, self.end)
        self._ended = asyncio.Event()

    @property
    def is_over(self) -> bool:
        return self._ended.is_set()

    async def wait(self) -> None:
        await self._ended.wait()

    def end(self) -> None:
        """Let the next suspected request and new requests run."""
        if not self._ended.is_set():
            self._timer.cancel()
            self._ended.set()
            self._lock.release()


@dataclass(frozen=True)
class _Loss:
    """Loss of a sampler: the time, and the number of requests there that had made no progress and may be the cause."""

    time: float
    suspect_count: int


class Suspects:
    """Requests that ran on samplers when the samplers failed, and that may be the cause.

    A request that crashes samplers could crash every sampler each time that a client sends it again, and the requests
    that run alongside it would fail too. Suspected requests therefore run one after the other, each until its first
    progress. Meanwhile, new requests wait, up to a time limit.

    Concurrency: use it from one event loop only.
    """

    def __init__(self) -> None:
        self._failures: OrderedDict[bytes, tuple[float, float]] = OrderedDict()
        """Failures in a row, and the time of the last one, by request."""
        self._lock = asyncio.Lock()
        self._turn: Turn | None = None
        self._in_flight: dict[str, dict[Slot, Attempt]] = {}
        """Requests on each replica."""
        self._losses: dict[str, _Loss] = {}
        """Recent losses by replica."""
        self._changed = asyncio.Event()
        """Set when a request makes progress or leaves a replica; a new event then replaces this one."""

    def failures_of(self, attempt: Attempt) -> float:
        """Return the number of samplers that recently failed in a row with this request, or an equal one."""
        if not self._failures or not attempt.message:
            return 0
        count, time = self._failures.get(_fingerprint(attempt), (0, 0.0))
        return count if asyncio.get_running_loop().time() < time + SUSPECT_SECONDS else 0

    @contextmanager
    def track(self, replica_id: str, attempt: Attempt, slot: Slot) -> Iterator[None]:
        """Count a request as in flight at a replica while the block runs."""
        attempt.begin_time = asyncio.get_running_loop().time()
        requests = self._in_flight.setdefault(replica_id, {})
        requests[slot] = attempt
        try:
            yield
        finally:
            del requests[slot]
            if not requests:
                del self._in_flight[replica_id]
            self._changed.set()
            self._changed = asyncio.Event()

    def blame(self, attempt: Attempt, replica: Replica) -> float:
        """Return the weight with which a replica's loss counts as a failure of one of its requests.

        A loss does not count for requests that reached the replica later. The last failure before a request is given
        up counts less if another request may be the cause, so a request that only ran next to the cause can succeed.
        """
        now, own_count = asyncio.get_running_loop().time(), 0 if attempt.is_delivering else 1
        loss = self._losses.get(replica.replica_id)
        if loss is None or (replica.is_static and loss.time < now - _LOST_SECONDS):
            # The attempt itself is no longer counted at the replica.
            loss = _Loss(now, self._count_without_progress(replica.replica_id) + own_count)
            self._losses = {name: item for name, item in self._losses.items() if item.time >= now - SUSPECT_SECONDS}
            self._losses[replica.replica_id] = loss
        elif attempt.begin_time > loss.time:
            return 0.0
        is_last = attempt.consecutive_failures + 1 >= MAX_CONSECUTIVE_FAILURES
        is_shared = loss.suspect_count > own_count
        return _SHARED_BLAME if is_last and is_shared else 1.0

    def record_failure(self, attempt: Attempt) -> None:
        if attempt.message:
            name = _fingerprint(attempt)
            count = max(attempt.consecutive_failures, self.failures_of(attempt))
            self._failures[name] = count, asyncio.get_running_loop().time()
            self._failures.move_to_end(name)
            if len(self._failures) > _MAX_SUSPECTS:
                self._failures.popitem(last=False)

    def record_progress(self, attempt: Attempt, replica_id: str) -> None:
        """Record that a sampler made progress with a request, which shows that the sampler is not lost."""
        self._losses.pop(replica_id, None)
        if self._failures and attempt.message:
            self._failures.pop(_fingerprint(attempt), None)
        self._changed.set()
        self._changed = asyncio.Event()

    def may_run(self, attempt: Attempt) -> bool:
        """Return whether a request may run now. Suspects need a turn; others run between turns or after a limit."""
        if attempt.consecutive_failures < SUSPECTED_FAILURES:
            is_waiting = attempt.yields_until is None or asyncio.get_running_loop().time() < attempt.yields_until
            return self._turn is None or self._turn.is_over or not is_waiting
        return attempt.turn is not None and not attempt.turn.is_over

    async def wait(self, attempt: Attempt, replica_id: str) -> None:
        """Wait until `may_run` may be true for a request that a replica could serve now."""
        if attempt.consecutive_failures >= SUSPECTED_FAILURES:
            await self._take_turn(attempt, replica_id)
            return
        attempt.yields_until = attempt.yields_until or asyncio.get_running_loop().time() + 2 * _ALONE_SECONDS
        if self._turn is not None:
            with suppress(TimeoutError):
                async with asyncio.timeout_at(attempt.yields_until):
                    await self._turn.wait()

    async def _take_turn(self, attempt: Attempt, replica_id: str) -> None:
        """Wait for a suspected request's turn, and then briefly for progress of the other requests on its replica."""
        await self._lock.acquire()
        self._turn = attempt.turn = Turn(self._lock)
        # Requests that were just routed to this replica need time to get their slots.
        await asyncio.sleep(_SENDING_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(_ALONE_SECONDS):
                while self._count_without_progress(replica_id):
                    await self._changed.wait()

    def _count_without_progress(self, replica_id: str) -> int:
        """Return the number of requests on a replica that have a slot and have made no progress."""
        requests = self._in_flight.get(replica_id, {})
        return sum(slot.is_granted and not attempt.is_delivering for slot, attempt in requests.items())


def _fingerprint(attempt: Attempt) -> bytes:
    content = attempt.message.replace(attempt.request_id.encode(), b'', 1)
    return hashlib.blake2b(attempt.tenant_id.encode() + b'\0' + content, digest_size=16).digest()
