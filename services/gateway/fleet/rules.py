"""The fleet: its replicas and their states. `sampler_choice` chooses the replica for a request.

A replica registers and then holds a lease. It is lost when it sends no report for the time of its lease, or when its
lease ends without a drain. Lost replicas are removed after `forget_after`. Static replicas, which are listed in the
configuration, hold no lease and are never removed.
"""

from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from twinkle_services.gateway.errors import ReplicaNotFound
from twinkle_services.kit.clock import Clock

MAX_REMEMBERED_DEPARTURES = 1024
"""Number of departed replicas whose ids are stored for watchers that resume."""
MAX_USED_VERSIONS = 256
"""Maximum number of used versions recorded for a replica. Its reports clear the record, except for static replicas."""
_FIRST_PAUSE_SECONDS = 0.5
_LONGEST_PAUSE_SECONDS = 8.0


class ReplicaState(StrEnum):
    """State of a replica."""

    READY = 'ready'
    """Accepts new requests."""
    DRAINING = 'draining'
    """Finishes its requests and accepts no new ones."""
    LOST = 'lost'
    """Sent no report for the time of its lease, or ended its lease without a drain."""


@dataclass(frozen=True, kw_only=True)
class ResidentAdapter:
    """An adapter version in a sampler's memory."""

    adapter_id: str
    version: int
    size_bytes: int = 0
    sequence_count: int = 0


@dataclass(frozen=True, kw_only=True)
class ReplicaLoad:
    """Load of a sampler's engine, with the fields of the contract's EngineLoad."""

    running_sequence_count: int = 0
    waiting_sequence_count: int = 0
    kv_usage: float = 0.0
    tokens_per_second: float = 0.0
    prefix_hit_rate: float = 0.0
    is_paused: bool = False
    max_sequence_count: int = 0
    """0 if the replica does not report it."""
    is_sleeping: bool = False


@dataclass(frozen=True, kw_only=True)
class ReplicaReport:
    """State that a replica reports about itself."""

    replica_id: str
    service: str
    address: str
    """'host:port' at which this gateway reaches the replica."""
    base_models: tuple[str, ...] = ()
    """Empty if unknown; such a replica may serve any base model."""
    is_draining: bool = False
    resident_adapters: tuple[ResidentAdapter, ...] = ()
    load: ReplicaLoad | None = None
    engine: str = ''
    followed_run: str = ''
    """Full-parameter run that the sampler is dedicated to; empty if it serves all runs."""


@dataclass(frozen=True, kw_only=True)
class Replica:
    """A member of the fleet in its current state."""

    report: ReplicaReport
    state: ReplicaState
    heartbeat_time: datetime
    join_time: datetime
    is_static: bool = False

    @property
    def replica_id(self) -> str:
        return self.report.replica_id

    @property
    def address(self) -> str:
        return self.report.address


@dataclass(kw_only=True)
class _Member:
    """A replica, and values that only `Fleet` needs."""

    replica: Replica
    report_seconds: float
    revision: int = 0
    lease_number: int = 0
    failure_count: int = 0
    paused_until: float = 0.0
    used_versions: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])


class Fleet:
    """All replicas, in memory. Each change increments the revision, which is 0 while no replica has registered.

    A replica that sends no report for `lease` is lost; a lost replica stays listed for `forget_after`.
    """

    def __init__(self, *, clock: Clock, lease: timedelta, forget_after: timedelta) -> None:
        self._clock = clock
        self._lease_seconds = lease.total_seconds()
        self._forget_seconds = forget_after.total_seconds()
        self._members: dict[str, _Member] = {}
        self._departures: OrderedDict[str, int] = OrderedDict()
        self.oldest_revision = 0
        """Watchers that resume from an older revision have missed changes."""
        self.revision = 0
        self.notify: Callable[[], None] = lambda: None
        """Called after each change."""

    def replicas(self) -> list[Replica]:
        """Return all replicas, by join time and then id."""
        found = [member.replica for member in self._members.values()]
        return sorted(found, key=lambda replica: (replica.join_time, replica.replica_id))

    def register(self, report: ReplicaReport, *, is_static: bool = False) -> Replica:
        """Add or update a replica. Remove other leased replicas at its address, because the replica replaced them."""
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
        self._departures.pop(report.replica_id, None)
        member = known or _Member(replica=replica, report_seconds=0.0)
        self._members[report.replica_id] = member
        self._record_report(member, replica)
        return replica

    def begin_lease(self, replica_id: str) -> int:
        """Return the number of a new lease, which supersedes the replica's earlier leases.

        Raises:
            ReplicaNotFound: the replica must register first.
        """
        member = self._member(replica_id)
        member.lease_number += 1
        return member.lease_number

    def renew(self, report: ReplicaReport) -> Replica:
        """Store a replica's report. A draining replica stays draining; a lost one becomes ready unless it now drains.

        Raises:
            ReplicaNotFound: the replica must register first.
        """
        member = self._member(report.replica_id)
        is_drain_requested = member.replica.state is ReplicaState.DRAINING
        state = ReplicaState.DRAINING if report.is_draining or is_drain_requested else ReplicaState.READY
        if not member.replica.is_static:
            member.used_versions.clear()
        now = self._clock.now()
        self._record_report(member, replace(member.replica, report=report, state=state, heartbeat_time=now))
        return member.replica

    def end_lease(self, replica_id: str, lease_number: int) -> None:
        """End a lease unless a newer one began. A draining replica leaves the fleet; any other is marked lost."""
        member = self._members.get(replica_id)
        if member is None or member.lease_number != lease_number:
            return
        if member.replica.state is ReplicaState.DRAINING:
            self._remove(replica_id)
        else:
            self.mark_lost(replica_id)

    def drain(self, replica_id: str) -> Replica:
        """Stop sending requests to a replica.

        Raises:
            ReplicaNotFound: no replica has this id, or it is lost.
        """
        member = self._member(replica_id)
        if member.replica.state is ReplicaState.LOST:
            raise ReplicaNotFound(replica_id)
        self._put(member, replace(member.replica, state=ReplicaState.DRAINING))
        return member.replica

    def mark_lost(self, replica_id: str) -> None:
        """Mark a replica as lost. Unknown ids and draining static replicas are ignored."""
        member = self._members.get(replica_id)
        if member is None or member.replica.state is ReplicaState.LOST:
            return
        if member.replica.is_static and member.replica.state is ReplicaState.DRAINING:
            return
        # The last reported load is outdated.
        report = replace(member.replica.report, load=None)
        self._put(member, replace(member.replica, report=report, state=ReplicaState.LOST))

    def expire(self) -> None:
        """Mark replicas with an expired lease as lost, and remove those that expired `forget_after` ago."""
        now = self._clock.monotonic()
        for member in list(self._members.values()):
            if member.replica.is_static:
                continue
            silent_seconds = now - member.report_seconds
            if silent_seconds > self._lease_seconds + self._forget_seconds:
                self._remove(member.replica.replica_id)
            elif silent_seconds > self._lease_seconds:
                self.mark_lost(member.replica.replica_id)

    def changes_after(self, revision: int) -> tuple[list[Replica], list[str]]:
        """Return the replicas that changed after `revision`, oldest change first, and the ids of those that left."""
        members = sorted(self._members.values(), key=lambda member: member.revision)
        changed = [member.replica for member in members if member.revision > revision]
        return changed, [replica_id for replica_id, left in self._departures.items() if left > revision]

    def serving(self, service: str) -> list[Replica]:
        """Return the replicas of a service that may be called, including draining replicas and lost static replicas.

        A static replica at the address of a leased one is the same process and is omitted.
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
        """Start a back-off for a replica that could not be reached, longer after each failure."""
        if member := self._members.get(replica_id):
            pause = min(_FIRST_PAUSE_SECONDS * 2**member.failure_count, _LONGEST_PAUSE_SECONDS)
            member.failure_count += 1
            member.paused_until = self._clock.monotonic() + pause

    def note_success(self, replica_id: str) -> None:
        """End the back-off of a replica."""
        if member := self._members.get(replica_id):
            member.failure_count, member.paused_until = 0, 0.0

    def is_reachable(self, replica_id: str) -> bool:
        """Return whether the replica is known, not lost, and not backing off."""
        member = self._members.get(replica_id)
        return (
            member is not None
            and member.replica.state is not ReplicaState.LOST
            and (not member.failure_count or member.paused_until <= self._clock.monotonic())
        )

    def note_resident(self, replica_id: str, adapter_id: str, version: int) -> None:
        """Record a version that a replica has just used; the next report of a leased replica clears the record."""
        if member := self._members.get(replica_id):
            if len(member.used_versions) >= MAX_USED_VERSIONS:
                member.used_versions.clear()
            member.used_versions.add((adapter_id, version))

    def versions_at(self, replica_id: str, adapter_id: str) -> Sequence[int]:
        """Return the versions of an adapter that a replica is known to hold."""
        member = self._members.get(replica_id)
        if member is None:
            return ()
        reported = member.replica.report.resident_adapters
        versions = [item.version for item in reported if item.adapter_id == adapter_id]
        return versions + [version for name, version in member.used_versions if name == adapter_id]

    def _member(self, replica_id: str) -> _Member:
        if replica_id not in self._members:
            raise ReplicaNotFound(replica_id)
        return self._members[replica_id]

    def _record_report(self, member: _Member, replica: Replica) -> None:
        """Record a report. It is a change if it ends a back-off or if a field other than the heartbeat time differs."""
        before = replace(member.replica, heartbeat_time=replica.heartbeat_time)
        is_change = not member.revision or member.failure_count > 0 or replica != before
        member.report_seconds = self._clock.monotonic()
        member.failure_count, member.paused_until = 0, 0.0
        if is_change:
            self._put(member, replica)
        else:
            member.replica = replica

    def _put(self, member: _Member, replica: Replica) -> None:
        self.revision += 1
        member.revision = self.revision
        member.replica = replica
        self.notify()

    def _remove(self, replica_id: str) -> None:
        del self._members[replica_id]
        self.revision += 1
        self._departures[replica_id] = self.revision
        while len(self._departures) > MAX_REMEMBERED_DEPARTURES:
            _, self.oldest_revision = self._departures.popitem(last=False)
        self.notify()


def serving_run(adapter_id: str, replicas: Sequence[Replica]) -> list[Replica]:
    """Return the replicas that are dedicated to `adapter_id` or, without such replicas, those that serve all runs."""
    dedicated = [item for item in replicas if adapter_id and item.report.followed_run == adapter_id]
    return dedicated or [item for item in replicas if not item.report.followed_run]


def weight_sources(replicas: Sequence[Replica], *, fan_out: int) -> dict[str, str]:
    """Return the address from which each ready, leased sampler fetches weights, by replica id.

    An empty address means the checkpoint service. Samplers with the same base models and run form a tree in the order
    of `replicas`: at most `fan_out` of them fetch from the checkpoint service, and at most `fan_out` from each sampler.
    With a `fan_out` of 0, all samplers fetch from the checkpoint service.
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
