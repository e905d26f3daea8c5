"""The fleet: which replicas there are and how each of them stands. Who gets a request is `routing`'s to say.

A replica registers, then holds a lease. One that is silent for longer than its lease, or whose lease
ends without a drain, is lost; a lost one is forgotten after a while. Members of the configuration hold no
lease and are never forgotten.
"""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from services.gateway.errors import ReplicaNotFound
from services.kit.clock import Clock

MAX_REMEMBERED_LEAVERS = 1024
"""Ids of members that left, kept for watchers that resume."""
MAX_LEARNED = 256
"""Versions noted for one member between its reports; a member of the configuration reports none."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0


class ReplicaState(StrEnum):
    """How a replica stands."""

    READY = 'ready'
    """Gets work."""
    DRAINING = 'draining'
    """Finishes what it has."""
    LOST = 'lost'
    """Was not heard of for too long."""


@dataclass(frozen=True, kw_only=True)
class ResidentAdapter:
    """A version that a sampler holds."""

    adapter_id: str
    version: int
    size_bytes: int = 0
    sequence_count: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """How busy a sampler's engine is; the contract's EngineLoad."""

    running_sequence_count: int = 0
    waiting_sequence_count: int = 0
    kv_usage: float = 0.0
    tokens_per_second: float = 0.0
    prefix_hit_rate: float = 0.0
    is_paused: bool = False
    max_sequence_count: int = 0
    """0: not told."""
    is_sleeping: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """What a replica says of itself."""

    replica_id: str
    service: str
    address: str
    """'host:port' at which this gateway reaches it."""
    base_models: tuple[str, ...] = ()
    """Empty: not known, which no request is held against."""
    is_draining: bool = False
    resident_adapters: tuple[ResidentAdapter, ...] = ()
    load: ReplicaLoad | None = None
    engine: str = ''
    followed_run: str = ''
    """The full-parameter run that a sampler belongs to; empty: to everybody."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A member of the fleet as it stands now."""

    report: ReplicaReport
    state: ReplicaState
    heartbeat_time: datetime
    join_time: datetime
    is_static: bool = False

    @property
    def replica_id(self) -> str:
        """Its id."""
        return self.report.replica_id

    @property
    def address(self) -> str:
        """Where it is reached."""
        return self.report.address


@dataclass(kw_only=True)
class _Member:
    """A replica and what only the fleet keeps of it."""

    replica: Replica
    heard_at: float
    revision: int = 0
    lease_number: int = 0
    failure_count: int = 0
    paused_until: float = 0.0
    learned: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


class Fleet:
    """All members, in memory. Every change has a revision, from 1."""

    def __init__(self, *, clock: Clock, lease: timedelta, forget_after: timedelta) -> None:
        """Begin empty.

        Args:
            clock: tells the time.
            lease: silence after which a replica is lost.
            forget_after: how long a lost one is remembered.
        """
        self._clock = clock
        self._lease_seconds = lease.total_seconds()
        self._forget_seconds = forget_after.total_seconds()
        self._members: dict[str, _Member] = {}
        self._leavers: OrderedDict[str, int] = OrderedDict()
        self.oldest_revision = 0
        """Watchers that resume from an older one have missed something."""
        self.revision = 0

    def replicas(self) -> list[Replica]:
        """Return all members, by time of joining, then id."""
        found = [member.replica for member in self._members.values()]
        return sorted(found, key=lambda replica: (replica.join_time, replica.replica_id))

    def find(self, replica_id: str) -> Replica:
        """Return a member.

        Raises:
            ReplicaNotFound: there is none of that id.
        """
        return self._member(replica_id).replica

    def register(self, report: ReplicaReport, *, is_static: bool = False) -> Replica:
        """Take a replica in; one that another start of the same process left at its address leaves."""
        for other in self.replicas():
            if other.address == report.address and other.replica_id != report.replica_id and not other.is_static:
                self._remove(other.replica_id)
        known = self._members.get(report.replica_id)
        now = self._clock.now()
        replica = Replica(
            report=report,
            state=ReplicaState.DRAINING if report.is_draining else ReplicaState.READY,
            heartbeat_time=now,
            join_time=known.replica.join_time if known else now,
            is_static=is_static,
        )
        self._leavers.pop(report.replica_id, None)
        member = known or _Member(replica=replica, heard_at=0.0)
        self._members[report.replica_id] = member
        self._hear(member, replica)
        return replica

    def begin_lease(self, replica_id: str) -> int:
        """Return the number of a new lease of a member; an older one of it means nothing any more.

        Raises:
            ReplicaNotFound: it has to register first.
        """
        member = self._member(replica_id)
        member.lease_number += 1
        return member.lease_number

    def renew(self, report: ReplicaReport) -> Replica:
        """Take what a member says of itself; one that was lost is back.

        Raises:
            ReplicaNotFound: it has to register first.
        """
        member = self._member(report.replica_id)
        was_asked = member.replica.state is ReplicaState.DRAINING
        state = ReplicaState.DRAINING if report.is_draining or was_asked else ReplicaState.READY
        if not member.replica.is_static:
            member.learned.clear()
        self._hear(member, replace(member.replica, report=report, state=state, heartbeat_time=self._clock.now()))
        return member.replica

    def end_lease(self, replica_id: str, lease_number: int) -> None:
        """Take it that the lease of that number is over: a draining member has left, another one is lost."""
        member = self._members.get(replica_id)
        if member is None or member.lease_number != lease_number:
            return
        if member.replica.state is ReplicaState.DRAINING:
            self._remove(replica_id)
        else:
            self.lose(replica_id)

    def drain(self, replica_id: str) -> Replica:
        """Give a member no more work.

        Raises:
            ReplicaNotFound: there is none of that id, or it is lost.
        """
        member = self._member(replica_id)
        if member.replica.state is ReplicaState.LOST:
            raise ReplicaNotFound(replica_id)
        self._put(member, replace(member.replica, state=ReplicaState.DRAINING))
        return member.replica

    def lose(self, replica_id: str) -> None:
        """Take it that a member is gone without a word; unknown and draining static ones stay as they are."""
        member = self._members.get(replica_id)
        if member is None or member.replica.state is ReplicaState.LOST:
            return
        if member.replica.is_static and member.replica.state is ReplicaState.DRAINING:
            return
        # How busy it was says nothing of it now.
        report = replace(member.replica.report, load=None)
        self._put(member, replace(member.replica, report=report, state=ReplicaState.LOST))

    def expire(self) -> None:
        """Lose members that were silent for too long, and forget those that were lost for long."""
        now = self._clock.monotonic()
        for member in list(self._members.values()):
            if member.replica.is_static:
                continue
            silent_seconds = now - member.heard_at
            if silent_seconds > self._lease_seconds + self._forget_seconds:
                self._remove(member.replica.replica_id)
            elif silent_seconds > self._lease_seconds:
                self.lose(member.replica.replica_id)

    def changes_after(self, revision: int) -> tuple[list[Replica], list[str]]:
        """Return the members that changed after `revision`, oldest change first, and the ids that left."""
        members = sorted(self._members.values(), key=lambda member: member.revision)
        changed = [member.replica for member in members if member.revision > revision]
        return changed, [leaver for leaver, when in self._leavers.items() if when > revision]

    def serving(self, service: str) -> list[Replica]:
        """Return the members of a service that may be called, draining ones included.

        A member of the configuration at the address of one that holds a lease is the same process; it is left out.
        """
        found = [item for item in self.replicas() if item.report.service == service]
        leased = {item.address for item in found if not item.is_static and item.state is not ReplicaState.LOST}
        return [
            item
            for item in found
            if (item.is_static and item.address not in leased)
            or (not item.is_static and item.state is not ReplicaState.LOST)
        ]

    def note_failure(self, replica_id: str) -> None:
        """Give a member that could not be reached no work for a moment, longer each time."""
        if member := self._members.get(replica_id):
            pause = min(_FIRST_PAUSE_SECONDS * 2**member.failure_count, _LONGEST_PAUSE_SECONDS)
            member.failure_count += 1
            member.paused_until = self._clock.monotonic() + pause

    def note_success(self, replica_id: str) -> None:
        """Take it that a member was reached."""
        if member := self._members.get(replica_id):
            member.failure_count, member.paused_until = 0, 0.0

    def is_reachable(self, replica_id: str) -> bool:
        """Whether nothing is known against calling it now."""
        member = self._members.get(replica_id)
        return (
            member is not None
            and member.replica.state is not ReplicaState.LOST
            and (not member.failure_count or member.paused_until <= self._clock.monotonic())
        )

    def note_resident(self, replica_id: str, adapter_id: str, version: int) -> None:
        """Take it, until its next report, that a member holds a version that it just used."""
        if member := self._members.get(replica_id):
            if len(member.learned) >= MAX_LEARNED:
                member.learned.clear()
            member.learned.add((adapter_id, version))

    def versions_at(self, replica_id: str, adapter_id: str) -> Sequence[int]:
        """Return the versions of an adapter that a member holds, as far as is known."""
        member = self._members.get(replica_id)
        if member is None:
            return ()
        reported = member.replica.report.resident_adapters
        versions = [item.version for item in reported if item.adapter_id == adapter_id]
        return versions + [version for name, version in member.learned if name == adapter_id]

    def _member(self, replica_id: str) -> _Member:
        if replica_id not in self._members:
            raise ReplicaNotFound(replica_id)
        return self._members[replica_id]

    def _hear(self, member: _Member, replica: Replica) -> None:
        """Take note of a sign of life; it is a change only where something else is new, or it may be called again."""
        before = replace(member.replica, heartbeat_time=replica.heartbeat_time)
        is_news = not member.revision or member.failure_count > 0 or replica != before
        member.heard_at = self._clock.monotonic()
        member.failure_count, member.paused_until = 0, 0.0
        if is_news:
            self._put(member, replica)
        else:
            member.replica = replica

    def _put(self, member: _Member, replica: Replica) -> None:
        self.revision += 1
        member.revision = self.revision
        member.replica = replica

    def _remove(self, replica_id: str) -> None:
        del self._members[replica_id]
        self.revision += 1
        self._leavers[replica_id] = self.revision
        while len(self._leavers) > MAX_REMEMBERED_LEAVERS:
            _, self.oldest_revision = self._leavers.popitem(last=False)


def serving_run(adapter_id: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Return those that belong to the run of that id where there are such, else those that belong to none."""
    dedicated = [item for item in replicas if adapter_id and item.report.followed_run == adapter_id]
    return dedicated or [item for item in replicas if not item.report.followed_run]


def weight_sources(replicas: Sequence[Replica], *, fan_out: int) -> dict[str, str]:
    """Return, by replica, the address of the one that it should take weights from; empty: the checkpoint service.

    Samplers of the same base models and run, by time of joining, make a tree: `fan_out` of them, at most, ask the
    checkpoint service, and as many ask each sampler.

    Args:
        replicas: by time of joining.
        fan_out: 0: all ask the checkpoint service.
    """
    sources: dict[str, str] = {}
    groups: dict[tuple[tuple[str, ...], str], list[Replica]] = {}
    for replica in replicas:
        if replica.report.service == 'sampler' and replica.state is ReplicaState.READY and not replica.is_static:
            groups.setdefault((replica.report.base_models, replica.report.followed_run), []).append(replica)
    for group in groups.values():
        for index, replica in enumerate(group):
            is_child = fan_out > 0 and index >= fan_out
            sources[replica.replica_id] = group[index // fan_out - 1].address if is_child else ''
    return sources
