"""What runs next on a replica: deficit round-robin on tokens between tenants, packed into batches.

Pure: it decides, and never waits or runs anything; `application.dispatcher` asks it. Each adapter offers one
verb at a time, so the order within an adapter is settled before (`domain.sequence`).

The algorithm is Shreedhar and Varghese's, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995,
section 3.2), with one change: a tenant is served while it has credit left and pays what the verb cost, so its
credit may fall below zero. A verb of any size is served without credit having to build up for it first.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Value = TypeVar('_Value')

QUICK_RUN = 128
"""Works without tokens that may run in a row while others wait. They take milliseconds: enough for the steps
of a full batch of small adapters, few enough that nothing starves."""
LEAST_TOKENS = 128
"""A bound on batches is never below this: a few short examples still share a pass, however slow the device."""


@dataclass(frozen=True, kw_only=True)
class ReadyVerb:
    """What an adapter has ready."""

    adapter_id: str
    tenant_id: str
    token_count: int
    """0 for what is quick, such as a step."""
    batch_key: str | None = None
    """Works with tokens and of one key may run together; None runs alone."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """What runs before a verb, if nothing else came."""

    quick_count: int = 0
    heavy_count: int = 0
    """Works with tokens."""
    batch_count: int = 0
    """Batches they make."""
    token_count: int = 0


@dataclass
class _Tenant:
    """Works with tokens of one tenant, and what it may still spend."""

    weight: float
    """Of its share: the tokens of that many batches in each round."""
    credit: float
    """Tokens left to it in this round; below zero where the last verb cost more than was left."""
    verbs: dict[str, ReadyVerb] = field(default_factory=dict[str, ReadyVerb])
    """Oldest first. An adapter that was served comes back at the end: round-robin between adapters."""
    by_key: dict[str | None, dict[str, ReadyVerb]] = field(default_factory=dict[str | None, dict[str, ReadyVerb]])
    """The same by batch key."""

    def copy(self) -> '_Tenant':
        """Return one that changes on its own."""
        by_key = {key: dict(verbs) for key, verbs in self.by_key.items()}
        return _Tenant(self.weight, self.credit, dict(self.verbs), by_key)

    def add(self, verb: ReadyVerb) -> None:
        self.verbs[verb.adapter_id] = verb
        self.by_key.setdefault(verb.batch_key, {})[verb.adapter_id] = verb

    def remove(self, verb: ReadyVerb) -> None:
        del self.verbs[verb.adapter_id]
        del self.by_key[verb.batch_key][verb.adapter_id]


class Scheduler:
    """Ready verbs, and which of them run next."""

    def __init__(self, *, batch_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        """Begin with nothing.

        Args:
            batch_tokens: of one batch; a larger verb still runs.
            weights: share of each tenant, positive; 1 for those not named.
        """
        self._most_tokens = batch_tokens
        self._batch_tokens = batch_tokens
        """Of a batch from now on; see `bound`."""
        self._weights = dict(weights or {})
        self._verbs: dict[str, ReadyVerb] = {}
        self._heavy_count = 0
        """Works with tokens among them."""
        self.token_count = 0
        """Tokens of all verbs that wait; for others to read."""
        self._quick: dict[str, dict[str, ReadyVerb]] = {}
        """Works without tokens by tenant, in the order of the tenants' turns; never an empty one."""
        self._quick_run = 0
        """Works without tokens handed out in a row."""
        self._tenants: dict[str, _Tenant] = {}
        """In the order of their turns. One that is idle stays until its spending is forgotten."""

    def __len__(self) -> int:
        """Return the number of verbs that wait."""
        return len(self._verbs)

    @property
    def is_batch_ready(self) -> bool:
        """Whether waiting for more verbs would not make the next batch fuller."""
        return not self._verbs or bool(self._quick) or self.token_count >= self._batch_tokens

    def bound(self, token_count: int | None) -> None:
        """Have batches from now on hold about so many tokens; None: as many as they may.

        A batch that holds all that waits serves tenants by how much they ask for. They share by their weights only
        where something waits beside the batch, so on a slow device batches have to be small.
        """
        most = self._most_tokens
        self._batch_tokens = most if token_count is None else min(most, max(LEAST_TOKENS, token_count))
        # What is left of larger shares would keep those away for long who come with smaller ones.
        for tenant in self._tenants.values():
            tenant.credit = min(tenant.credit, tenant.weight * self._batch_tokens)

    def add(self, verb: ReadyVerb) -> None:
        """Take a verb of an adapter that has none here.

        Raises:
            ValueError: it has one.
        """
        if verb.adapter_id in self._verbs:
            raise ValueError(f'adapter {verb.adapter_id!r} has a verb here already')
        self._verbs[verb.adapter_id] = verb
        if not verb.token_count:
            self._quick.setdefault(verb.tenant_id, {})[verb.adapter_id] = verb
            return
        self._heavy_count += 1
        self.token_count += verb.token_count
        if verb.tenant_id not in self._tenants:
            weight = self._weights.get(verb.tenant_id, 1.0)
            self._tenants[verb.tenant_id] = _Tenant(weight, weight * self._batch_tokens)
        self._tenants[verb.tenant_id].add(verb)

    def remove(self, adapter_id: str) -> ReadyVerb | None:
        """Take an adapter's verb back; None where there is none."""
        verb = self._verbs.pop(adapter_id, None)
        if verb is None:
            return None
        if verb.token_count:
            self._heavy_count -= 1
            self.token_count -= verb.token_count
            self._tenants[verb.tenant_id].remove(verb)
        else:
            del self._quick[verb.tenant_id][adapter_id]
            if not self._quick[verb.tenant_id]:
                del self._quick[verb.tenant_id]
        if not self._verbs:
            self._tenants.clear()
        return verb

    def next_batch(self) -> list[ReadyVerb]:
        """Take the verbs that are to run next, together; empty where nothing waits."""
        lead = self._next_quick() or self._next_heavy()
        if lead is None:
            return []
        batch = [self._take(lead)]
        if lead.token_count and lead.batch_key is not None:
            self._fill(batch)
        return batch

    def ahead_of(self, adapter_id: str) -> Ahead | None:
        """Return what runs before an adapter's verb; None where it has none. Plays the queue to the end."""
        if adapter_id not in self._verbs:
            return None
        future, before = self._copy(), list[list[ReadyVerb]]()
        while adapter_id in future._verbs:  # noqa: SLF001 - a copy of itself
            before.append(future.next_batch())
        heavy = [batch for batch in before[:-1] if batch[0].token_count]
        return Ahead(
            quick_count=len(before) - 1 - len(heavy),
            heavy_count=sum(map(len, heavy)),
            batch_count=len(heavy),
            token_count=sum(verb.token_count for batch in heavy for verb in batch),
        )

    def _copy(self) -> 'Scheduler':
        twin = Scheduler(batch_tokens=self._most_tokens, weights=self._weights)
        twin._batch_tokens = self._batch_tokens
        twin._verbs = dict(self._verbs)
        twin._heavy_count, twin.token_count = self._heavy_count, self.token_count
        twin._quick_run = self._quick_run
        twin._quick = {tenant_id: dict(verbs) for tenant_id, verbs in self._quick.items()}
        twin._tenants = {tenant_id: tenant.copy() for tenant_id, tenant in self._tenants.items()}
        return twin

    def _next_quick(self) -> ReadyVerb | None:
        if not self._quick or (self._heavy_count and self._quick_run == QUICK_RUN):
            self._quick_run = 0
            return None
        self._quick_run = min(self._quick_run + 1, QUICK_RUN)
        return next(iter(next(iter(self._quick.values())).values()))

    def _next_heavy(self) -> ReadyVerb | None:
        while self._heavy_count:
            for tenant in self._tenants.values():
                if tenant.verbs and tenant.credit > 0:
                    return next(iter(tenant.verbs.values()))
            self._begin_round()
        return None

    def _fill(self, batch: list[ReadyVerb]) -> None:
        """Add what may run with the first verb and fits, a verb of each tenant in turn."""
        key, room = batch[0].batch_key, self._room_beside(batch[0].token_count)
        is_more = True
        while room and is_more:
            is_more = False
            for tenant in list(self._tenants.values()):
                verb = next(iter(tenant.by_key.get(key, {}).values()), None)
                if verb is not None and tenant.credit > 0 and verb.token_count <= room:
                    batch.append(self._take(verb))
                    room -= verb.token_count
                    is_more = True
            is_more = is_more or self._begin_round()

    def _room_beside(self, token_count: int) -> int:
        """Return how many tokens fit beside a verb: as many as make its passes full, or as time allows."""
        if self._batch_tokens < self._most_tokens:
            return max(self._batch_tokens - token_count, 0)
        return -token_count % self._most_tokens

    def _take(self, verb: ReadyVerb) -> ReadyVerb:
        """Remove a verb that is to run; its tenant pays, and goes behind the others."""
        if verb.token_count:
            self._tenants[verb.tenant_id].credit -= verb.token_count
            _move_to_end(self._tenants, verb.tenant_id)
        else:
            _move_to_end(self._quick, verb.tenant_id)
        self.remove(verb.adapter_id)
        return verb

    def _begin_round(self) -> bool:
        """Give each tenant its share, once all that wait have spent theirs; say whether they had.

        As many rounds at once as bring the first of them back above zero.
        """
        waiting = [tenant for tenant in self._tenants.values() if tenant.verbs]
        if not waiting or any(tenant.credit > 0 for tenant in waiting):
            return False
        rounds = 1 + min(-tenant.credit // (tenant.weight * self._batch_tokens) for tenant in waiting)
        for tenant_id, tenant in list(self._tenants.items()):
            share = tenant.weight * self._batch_tokens
            tenant.credit = min(tenant.credit + rounds * share, share)
            if not tenant.verbs and tenant.credit == share:
                del self._tenants[tenant_id]
        return True


def _move_to_end(turns: dict[str, _Value], tenant_id: str) -> None:
    turns[tenant_id] = turns.pop(tenant_id)
