"""Turns at samplers: more than one can run at once waits here, where tenants are told apart, and not in its queue."""

import asyncio
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.fair_shares import equal_weight
from services.gateway.sampling.replica_turns import ReplicaTurns, Turn
from services.kit.errors import Draining, QueueFull


class Place:
    """A request's place at a replica."""

    def __init__(self, turns: 'Turns', replica_id: str, turn: Turn) -> None:
        """Belong to `turn`."""
        self._turns = turns
        self._replica_id = replica_id
        self._turn = turn
        self._coming = asyncio.Event()
        self._error: Draining | None = None

    @property
    def is_given(self) -> bool:
        """Whether its turn has come."""
        return self._turn.is_given

    async def turn(self) -> None:
        """Return when its turn has come.

        Raises:
            Draining: the replica left while it waited.
        """
        if not self.is_given:
            await self._coming.wait()
        if self._error is not None:
            raise self._error

    def done(self, weight: int) -> None:
        """Take it that some of its sequences are finished, so that others may begin."""
        self._turns.done(self._replica_id, self._turn, weight)

    def come(self, error: Draining | None = None) -> None:
        """Let it go on, or fail."""
        self._error = error
        self._coming.set()


class Turns:
    """Gives turns at every replica, by tenants' weights.

    Concurrency: one event loop. Each gateway gives turns of its own: several of them together may have more at a
    replica than one would, and each is fair to whoever asks it.
    """

    def __init__(self, *, waiting_per_tenant: int, weight_of: Callable[[str], float] = equal_weight) -> None:
        """Begin with nobody waiting.

        Args:
            waiting_per_tenant: requests of a tenant that may wait for one replica.
            weight_of: returns a tenant's weight as it is now, above 0.
        """
        self._waiting_per_tenant = waiting_per_tenant
        self._weight_of = weight_of
        self._replicas: dict[str, ReplicaTurns] = {}
        self._places: dict[Turn, Place] = {}

    @contextmanager
    def place(self, replica: Replica, tenant_id: str, weight: int) -> Iterator[Place]:
        """Have a place at a replica during the block; `Place.turn` waits until it may be used.

        Args:
            replica: as it was found.
            tenant_id: whose request it is.
            weight: sequences it will run.

        Raises:
            QueueFull: as many of the tenant's wait there as may.
        """
        turns = self._replicas.setdefault(replica.replica_id, ReplicaTurns(weight_of=self._weight_of))
        load = replica.report.load
        turns.capacity = load.max_sequence_count if load is not None and load.max_sequence_count > 0 else None
        if (waiting := turns.waiting_count(tenant_id)) >= self._waiting_per_tenant:
            raise QueueFull(queue_length=waiting, queue_limit=self._waiting_per_tenant)
        turn = Turn(tenant_id, weight)
        place = self._places[turn] = Place(self, replica.replica_id, turn)
        turns.ask(turn)
        self._give(turns)
        try:
            yield place
        finally:
            self.done(replica.replica_id, turn, None)
            del self._places[turn]

    def done(self, replica_id: str, turn: Turn, weight: int | None) -> None:
        """Take it that some of a request's sequences are finished, or (None) that all of it is over."""
        turns = self._replicas.get(replica_id)
        if turns is None:
            return
        turns.done(turn, weight)
        self._give(turns)
        if turns.is_empty:
            del self._replicas[replica_id]

    def keep_only(self, replica_ids: Collection[str]) -> None:
        """Let those go elsewhere that wait for other replicas than these."""
        for replica_id in self._replicas.keys() - set(replica_ids):
            for turn in self._replicas[replica_id].take_waiting():
                self._places[turn].come(Draining())

    def _give(self, turns: ReplicaTurns) -> None:
        for turn in turns.give():
            self._places[turn].come()
