"""The fleet while it lives: its members, their loads, and whoever waits for a change."""

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from services.gateway.fleet.routing import (
    LoadBook,
    PrefixMemory,
    RouteKey,
    candidates,
    choose,
)
from services.gateway.fleet.rules import Fleet, Replica, ReplicaReport, ReplicaState, serving_run


class Membership:
    """Joins the fleet, the loads and the prefixes; every verb about them goes through here.

    Concurrency: one event loop; no method but `wait_for_change` waits.
    """

    def __init__(self, fleet: Fleet) -> None:
        """Begin with `fleet`."""
        self.fleet = fleet
        self._book = LoadBook()
        self._memory = PrefixMemory()
        self._calls: Counter[str] = Counter()
        """Calls that are open, by address."""
        self._followers: list[Callable[[], None]] = []
        self._waiting: deque[asyncio.Future[None]] = deque()
        self.is_closing = asyncio.Event()
        """Set when the gateway is about to stop: what follows the fleet, or a lease, ends."""

    def register(self, report: ReplicaReport, *, is_static: bool = False) -> Replica:
        """Take a replica in."""
        with self._changing():
            return self.fleet.register(report, is_static=is_static)

    def renew(self, report: ReplicaReport) -> Replica:
        """Take what a member says of itself.

        Raises:
            ReplicaNotFound: it has to register first.
        """
        with self._changing():
            replica = self.fleet.renew(report)
            self._book.reported(report.replica_id)
            return replica

    def end_lease(self, replica_id: str, lease_number: int) -> None:
        """Take it that a lease is over."""
        with self._changing():
            self.fleet.end_lease(replica_id, lease_number)

    def drain(self, replica_id: str) -> Replica:
        """Give a member no more work.

        Raises:
            ReplicaNotFound: there is none of that id.
        """
        with self._changing():
            return self.fleet.drain(replica_id)

    def lose(self, replica_id: str) -> None:
        """Take it that a member is gone."""
        with self._changing():
            self.fleet.lose(replica_id)

    def expire(self) -> None:
        """Lose and forget whoever was silent."""
        with self._changing():
            self.fleet.expire()
        self._book.keep_only({replica.replica_id for replica in self.fleet.replicas()})

    def find_for(self, key: RouteKey, *, excluded: frozenset[str] | set[str]) -> Replica | None:
        """Return the replica that a request goes to; one that is known to be out of reach only if all are."""
        members = serving_run(key.adapter.adapter_id if key.adapter else '', self.fleet.serving('sampler'))
        fit = [item for item in candidates(key, members) if item.replica_id not in excluded]
        usable = [item for item in fit if self.fleet.is_reachable(item.replica_id)] or fit
        return choose(key, usable, book=self._book, memory=self._memory, versions_at=self.fleet.versions_at)

    @contextmanager
    def working(self, replica: Replica, weight: int) -> Iterator[None]:
        """Count `weight` sequences as running at a replica during the block."""
        self._book.begin(replica.replica_id, weight)
        self._calls[replica.address] += 1
        try:
            yield
        finally:
            self._book.end(replica.replica_id, weight)
            self._calls[replica.address] -= 1
            if not self._calls[replica.address]:
                del self._calls[replica.address]

    @property
    def known_load_count(self) -> int:
        """Of how many replicas something is kept about their load."""
        return len(self._book)

    def addresses_in_use(self) -> set[str]:
        """Return the addresses of all members, and of those that left and still have calls from here."""
        return {replica.address for replica in self.fleet.replicas()} | set(self._calls)

    def ready_ids(self) -> set[str]:
        """Return the ids of the samplers that take work, those left out that are draining."""
        serving = self.fleet.serving('sampler')
        return {replica.replica_id for replica in serving if replica.state is not ReplicaState.DRAINING}

    def on_change(self, follow: Callable[[], None]) -> None:
        """Call `follow` after each change."""
        self._followers.append(follow)

    async def wait_for_change(self, revision: int) -> None:
        """Return once the fleet's revision is beyond `revision`, or the gateway is about to stop."""
        while self.fleet.revision <= revision and not self.is_closing.is_set():
            waiter = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            try:
                await waiter
            finally:
                if not waiter.done() or waiter.cancelled():
                    self._waiting.remove(waiter)

    def close(self) -> None:
        """End what follows the fleet, and leases."""
        self.is_closing.set()
        self._wake()

    @contextmanager
    def _changing(self) -> Iterator[None]:
        before = self.fleet.revision
        yield
        if self.fleet.revision != before:
            self._wake()
            for follow in self._followers:
                follow()

    def _wake(self) -> None:
        waiting, self._waiting = self._waiting, deque()
        for waiter in waiting:
            if not waiter.done():
                waiter.set_result(None)
