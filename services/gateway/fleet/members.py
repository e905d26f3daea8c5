"""The fleet in memory: its replicas and their load, and notifications of changes."""

import asyncio
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

from twinkle_services.gateway.fleet.rules import Fleet, Replica, ReplicaReport, ReplicaState, serving_run
from twinkle_services.gateway.fleet.sampler_choice import LoadTable, PrefixMemory, RouteKey, candidates, choose


class Membership:
    """Stores the fleet, the load of its replicas and the prefixes sent to them, and notifies listeners of changes.

    Change replicas with `fleet`, except for `renew` and `expire`, which also update the loads. All methods except
    `wait_for_change` return immediately.

    Concurrency: use it from one event loop only.
    """

    def __init__(self, fleet: Fleet) -> None:
        self.fleet = fleet
        fleet.notify = self._notify
        self._loads = LoadTable()
        self._prefixes = PrefixMemory()
        self._open_calls: Counter[str] = Counter()
        """Number of open calls by address."""
        self._listeners: list[Callable[[], None]] = []
        self._changed = asyncio.Event()
        """Set at the next change, which also creates a new event."""
        self.is_closing = asyncio.Event()
        """Set when the gateway begins to stop; watches and leases then finish."""

    def renew(self, report: ReplicaReport) -> Replica:
        """Store a replica's report as `Fleet.renew` does, and use the load in the report from now on."""
        replica = self.fleet.renew(report)
        self._loads.reported(report.replica_id)
        return replica

    def expire(self) -> None:
        """Expire leases as `Fleet.expire` does, and delete the loads of removed replicas."""
        self.fleet.expire()
        self._loads.keep_only({replica.replica_id for replica in self.fleet.replicas()})

    def find_for(self, key: RouteKey, *, excluded: frozenset[str] | set[str]) -> Replica | None:
        """Return the sampler for a request, or None. Lost samplers and samplers that back off are the last choice."""
        members = serving_run(key.adapter.adapter_id if key.adapter else '', self.fleet.serving('sampler'))
        eligible = [item for item in candidates(key, members) if item.replica_id not in excluded]
        usable = [item for item in eligible if self.fleet.is_reachable(item.replica_id)] or eligible
        return choose(key, usable, loads=self._loads, memory=self._prefixes, versions_at=self.fleet.versions_at)

    @contextmanager
    def track_sequences(self, replica: Replica, weight: int) -> Iterator[None]:
        """Count `weight` sequences as running on a replica, and its address as in use, while the block runs."""
        self._loads.begin(replica.replica_id, weight)
        self._open_calls[replica.address] += 1
        try:
            yield
        finally:
            self._loads.end(replica.replica_id, weight)
            self._open_calls[replica.address] -= 1
            if not self._open_calls[replica.address]:
                del self._open_calls[replica.address]

    def count_by_state(self) -> Mapping[str, float]:
        """Return the number of samplers by state."""
        return Counter(replica.state.value for replica in self.fleet.replicas() if replica.report.service == 'sampler')

    @property
    def known_load_count(self) -> int:
        return len(self._loads)

    def addresses_in_use(self) -> set[str]:
        """Return the addresses of all replicas, and of departed replicas that still have open calls."""
        return {replica.address for replica in self.fleet.replicas()} | set(self._open_calls)

    def ready_ids(self) -> set[str]:
        """Return the ids of the samplers in `Fleet.serving` that are not draining."""
        serving = self.fleet.serving('sampler')
        return {replica.replica_id for replica in serving if replica.state is not ReplicaState.DRAINING}

    def on_change(self, listener: Callable[[], None]) -> None:
        """Call `listener` after each change of the fleet, as `Fleet` defines changes."""
        self._listeners.append(listener)

    async def wait_for_change(self, revision: int) -> None:
        """Return once the fleet's revision exceeds `revision`, or when the gateway begins to stop."""
        while self.fleet.revision <= revision and not self.is_closing.is_set():
            await self._changed.wait()

    def close(self) -> None:
        """End all watches and leases."""
        self.is_closing.set()
        self._wake()

    def _notify(self) -> None:
        self._wake()
        for listener in self._listeners:
            listener()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
