"""Whose turn it is at one replica: beyond what it runs at once, tenants share turns by their weights.

Pure: it decides, and never waits or runs anything. `application.turns` asks it.
"""

from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass

from services.gateway.sampling.fair_shares import FairShares, equal_weight

SLACK = 1.25
"""Sequences at a replica for each that it runs at once: a little more than it can do, so that none of its places is
empty while the next request is on its way."""


@dataclass(eq=False)
class Turn:
    """A request's turn."""

    tenant_id: str
    weight: int
    """Sequences it still has to run."""
    is_given: bool = False


class ReplicaTurns:
    """Requests at a replica, and those that wait for it."""

    def __init__(self, *, weight_of: Callable[[str], float] = equal_weight) -> None:
        """Begin with none; `weight_of` returns a tenant's weight as it is now, above 0."""
        self.capacity: int | None = None
        """Sequences that the replica runs at once; None: it does not say, so that nobody waits."""
        self._running: Counter[str] = Counter()
        """Sequences that were given their turn, by tenant."""
        self._total = 0
        self._waiting: OrderedDict[str, deque[Turn]] = OrderedDict()
        self._shares = FairShares(weight_of, is_here=lambda name: name in self._waiting or name in self._running)

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits or runs."""
        return not self._waiting and not self._total

    def waiting_count(self, tenant_id: str) -> int:
        """Return how many requests of a tenant wait."""
        return len(self._waiting.get(tenant_id, ()))

    def ask(self, turn: Turn) -> None:
        """Have a request wait; `give` tells when its turn has come."""
        self._waiting.setdefault(turn.tenant_id, deque()).append(turn)

    def give(self) -> list[Turn]:
        """Return those whose turn it is from now on.

        A request that is larger than what is left gets its turn all the same: it would wait for ever behind smaller
        ones, and what it has too much waits in the engine. A tenant that has nothing at the replica never waits, so
        that others whose answers nobody reads, and which last for ever, do not keep it away.
        """
        given: list[Turn] = []
        while able := self._able():
            tenant = min(able, key=lambda name: (self._shares.begin_of(name), self._running[name]))
            turn = self._waiting[tenant].popleft()
            self._drop_empty(tenant)
            self._shares.serve(tenant, cost=turn.weight)
            self._running[tenant] += turn.weight
            self._total += turn.weight
            turn.is_given = True
            given.append(turn)
        return given

    def done(self, turn: Turn, weight: int | None = None) -> None:
        """Take it that some of a request's sequences are finished, or (None) that all of it is over."""
        weight = turn.weight if weight is None else min(weight, turn.weight)
        turn.weight -= weight
        if turn.is_given:
            self._running[turn.tenant_id] -= weight
            self._total -= weight
            if not self._running[turn.tenant_id]:
                del self._running[turn.tenant_id]
        elif not turn.weight and turn in self._waiting.get(turn.tenant_id, ()):
            self._waiting[turn.tenant_id].remove(turn)
            self._drop_empty(turn.tenant_id)

    def take_waiting(self) -> list[Turn]:
        """Return those that wait, which wait no more."""
        waiting = [turn for turns in self._waiting.values() for turn in turns]
        self._waiting.clear()
        return waiting

    def _able(self) -> list[str]:
        if self.capacity is None or self._total < SLACK * self.capacity:
            return list(self._waiting)
        return [name for name in self._waiting if name not in self._running]

    def _drop_empty(self, tenant_id: str) -> None:
        if self._waiting[tenant_id]:
            self._waiting.move_to_end(tenant_id)
        else:
            del self._waiting[tenant_id]
