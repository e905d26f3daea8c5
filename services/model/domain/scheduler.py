"""Order of verbs on a replica: deficit round-robin by tokens between tenants, packed into batches.

The scheduler makes decisions only; `application.dispatcher` runs the verbs. Each adapter has at most one ready verb, so
the order within an adapter is decided earlier (`domain.sequence`).

The algorithm is Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995, section
3.2), with one change: a tenant is served while it has credit and then pays the verb's cost, so its credit may become
negative. A large verb does not have to wait until enough credit has accumulated.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TypeVar

_Value = TypeVar('_Value')

QUICK_RUN = 128
"""Maximum number of quick verbs, those without tokens, in a row while others wait. They take milliseconds: enough for
the steps of a full batch of small adapters, but few enough that other verbs are not starved."""
LEAST_TOKENS = 128
"""Lower limit for the batch size in tokens: a few short examples share a pass even on a slow device."""


@dataclass(frozen=True, kw_only=True)
class ReadyVerb:
    """An adapter's ready verb."""

    adapter_id: str
    tenant_id: str
    token_count: int
    """Number of tokens; 0 for a quick verb, such as a step."""
    batch_key: str | None = None
    """Verbs with tokens and the same key may run together; None runs alone."""


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """Verbs that run before a given one if no more arrive."""

    quick_count: int = 0
    heavy_count: int = 0
    """Number of verbs with tokens."""
    batch_count: int = 0
    """Number of batches that these verbs form."""
    token_count: int = 0


@dataclass
class _Tenant:
    """Verbs with tokens of one tenant, and its remaining credit."""

    weight: float
    """Share of the tenant, in batches of tokens per round."""
    credit: float
    """Remaining tokens in this round; negative if the last verb cost more."""
    verbs: dict[str, ReadyVerb] = field(default_factory=dict[str, ReadyVerb])
    """Oldest first. An adapter that was served returns at the end, which gives round-robin between adapters."""
    by_key: dict[str | None, dict[str, ReadyVerb]] = field(default_factory=dict[str | None, dict[str, ReadyVerb]])
    """The same verbs by batch key."""

    def copy(self) -> '_Tenant':
        by_key = {key: dict(verbs) for key, verbs in self.by_key.items()}
        return _Tenant(self.weight, self.credit, dict(self.verbs), by_key)

    def add(self, verb: ReadyVerb) -> None:
        self.verbs[verb.adapter_id] = verb
        self.by_key.setdefault(verb.batch_key, {})[verb.adapter_id] = verb

    def remove(self, verb: ReadyVerb) -> None:
        del self.verbs[verb.adapter_id]
        del self.by_key[verb.batch_key][verb.adapter_id]


class Scheduler:
    """Ready verbs and their order."""

    def __init__(self, *, batch_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        """Initialize without verbs.

        Args:
            batch_tokens: Maximum number of tokens per batch; a larger verb runs alone.
            weights: Share of each tenant, positive; 1 for tenants that are not listed.
        """
        self._most_tokens = batch_tokens
        self._batch_tokens = batch_tokens
        """Current batch size, see `bound`."""
        self._weights = dict(weights or {})
        self._verbs: dict[str, ReadyVerb] = {}
        self._heavy_count = 0
        """Number of ready verbs with tokens."""
        self.token_count = 0
        """Number of tokens of all ready verbs."""
        self._quick: dict[str, dict[str, ReadyVerb]] = {}
        """Verbs without tokens by tenant, in the order of the tenants' turns; tenants without verbs are removed."""
        self._quick_run = 0
        """Number of quick verbs in a row so far."""
        self._tenants: dict[str, _Tenant] = {}
        """Tenants in the order of their turns. An idle tenant stays until its credit is restored."""

    def __len__(self) -> int:
        """Return the number of ready verbs."""
        return len(self._verbs)

    @property
    def is_batch_ready(self) -> bool:
        """Whether waiting for more verbs cannot make the next batch fuller."""
        return not self._verbs or bool(self._quick) or self.token_count >= self._batch_tokens

    def bound(self, token_count: int | None) -> None:
        """Limit the size of future batches to about `token_count` tokens; None removes the limit.

        A batch that contains all ready verbs serves tenants in proportion to their load. Tenants share by weight only
        if some verbs do not fit, so batches must be small on a slow device.
        """
        most = self._most_tokens
        self._batch_tokens = most if token_count is None else min(most, max(LEAST_TOKENS, token_count))
        # Credit from larger batches would delay tenants that arrive now for a long time.
        for tenant in self._tenants.values():
            tenant.credit = min(tenant.credit, tenant.weight * self._batch_tokens)

    def add(self, verb: ReadyVerb) -> None:
        """Add the ready verb of an adapter.

        Raises:
            ValueError: The adapter has a ready verb already.
        """
        if verb.adapter_id in self._verbs:
            raise ValueError(f'adapter {verb.adapter_id!r} already has a ready verb')
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
        """Withdraw an adapter's verb; return None if it has no ready verb."""
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
        """Remove and return the verbs that run next, together; empty if no verb is ready."""
        lead = self._next_quick() or self._next_heavy()
        if lead is None:
            return []
        batch = [self._take(lead)]
        if lead.token_count and lead.batch_key is not None:
            self._fill(batch)
        return batch

    def ahead_of(self, adapter_id: str) -> Ahead | None:
        """Return the verbs that run before an adapter's verb; None if it has no ready verb. Simulates the queue."""
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
        """Add verbs that may run with the first one and fit, one per tenant in turn."""
        key, capacity = batch[0].batch_key, self._capacity_beside(batch[0].token_count)
        is_more = True
        while capacity and is_more:
            is_more = False
            for tenant in list(self._tenants.values()):
                verb = next(iter(tenant.by_key.get(key, {}).values()), None)
                if verb is not None and tenant.credit > 0 and verb.token_count <= capacity:
                    batch.append(self._take(verb))
                    capacity -= verb.token_count
                    is_more = True
            is_more = is_more or self._begin_round()

    def _capacity_beside(self, token_count: int) -> int:
        """Return the number of tokens that fit beside a verb: enough to fill its passes, or as many as time allows."""
        if self._batch_tokens < self._most_tokens:
            return max(self._batch_tokens - token_count, 0)
        return -token_count % self._most_tokens

    def _take(self, verb: ReadyVerb) -> ReadyVerb:
        """Remove a verb that runs now, charge its tenant, and move the tenant to the end."""
        if verb.token_count:
            self._tenants[verb.tenant_id].credit -= verb.token_count
            _move_to_end(self._tenants, verb.tenant_id)
        else:
            _move_to_end(self._quick, verb.tenant_id)
        self.remove(verb.adapter_id)
        return verb

    def _begin_round(self) -> bool:
        """Start a new round if all waiting tenants have spent their credit; return whether it did.

        Skips as many rounds as needed until the first tenant has positive credit.
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
