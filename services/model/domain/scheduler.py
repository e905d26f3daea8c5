"""Schedules verbs on a replica: deficit round-robin by tokens between tenants, with verbs packed into batches.

The scheduler only selects verbs; `application.dispatcher` runs them. Each adapter has at most one ready verb;
`domain.sequence` defines the order of an adapter's verbs.

The algorithm is Shreedhar and Varghese, "Efficient fair queueing using deficit round robin" (SIGCOMM 1995, section
3.2), with one change. A tenant is served while it has credit and then pays the verb's cost, so its credit may become
negative. A large verb does not have to wait until enough credit has accumulated. A verb with more tokens than a pass
is selected and paid for once per pass.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

QUICK_RUN = 128
"""Maximum number of consecutive quick verbs (verbs without tokens) while others wait. A quick verb takes milliseconds.
The limit allows the steps of a full batch of small adapters, but does not starve other verbs."""
MAX_SIMULATED_BATCHES = 200
"""Maximum number of batches that `ahead_of` simulates. A simulation takes milliseconds on the event loop."""
MIN_BATCH_TOKENS = 128
"""Lower limit of the batch size in tokens, so that a few short examples share a pass even on a slow device."""


@dataclass(frozen=True, kw_only=True)
class ReadyVerb:
    """An adapter's ready verb."""

    adapter_id: str
    tenant_id: str
    token_count: int
    """Number of tokens; 0 for a quick verb, such as a step."""
    batch_key: str | None = None
    """Verbs with tokens and the same key may run together; a verb without a key runs alone."""
    has_begun: bool = False
    """Whether a pass of the verb has run."""


@dataclass(frozen=True, kw_only=True)
class VerbsAhead:
    """Verbs that run before a given verb if no more verbs arrive."""

    quick_count: int = 0
    """Number of quick verbs, which have no tokens."""
    heavy_count: int = 0
    """Number of verbs with tokens."""
    batch_count: int = 0
    """Number of batches that these verbs form."""
    token_count: int = 0


@dataclass(frozen=True, kw_only=True)
class NextPass:
    """Size of the next batch."""

    token_count: int
    """Maximum number of tokens."""
    is_full: bool
    """Whether the batch has no capacity for further verbs."""


@dataclass
class _Tenant:
    """A tenant's ready verbs with tokens, and its remaining credit."""

    weight: float
    """Share of the tenant: it receives credit for this many full batches in each round."""
    credit: float
    """Remaining tokens in this round; negative if the last verb cost more."""
    batch_tokens: int
    """Number of tokens of a pass; a verb with more tokens is large."""
    verbs: dict[str, ReadyVerb] = field(default_factory=dict[str, ReadyVerb])
    """Verbs by adapter, oldest first. An adapter's next verb is added at the end, which gives round-robin order."""
    by_key: dict[str | None, dict[str, ReadyVerb]] = field(default_factory=dict[str | None, dict[str, ReadyVerb]])
    """The verbs that are not large, by batch key."""
    large: dict[str, ReadyVerb] = field(default_factory=dict[str, ReadyVerb])
    """The large verbs that have not begun."""
    large_begun: dict[str, ReadyVerb] = field(default_factory=dict[str, ReadyVerb])
    """The verbs that have begun and are still large."""
    begun_count: int = 0
    """Number of ready verbs that have begun, whether large or not."""

    def copy(self) -> '_Tenant':
        by_key = {key: dict(verbs) for key, verbs in self.by_key.items()}
        copied = {'verbs': dict(self.verbs), 'large': dict(self.large), 'large_begun': dict(self.large_begun)}
        return replace(self, by_key=by_key, **copied)

    def add(self, verb: ReadyVerb) -> None:
        self.verbs[verb.adapter_id] = verb
        self._kind_of(verb)[verb.adapter_id] = verb
        self.begun_count += verb.has_begun

    def remove(self, verb: ReadyVerb) -> None:
        del self.verbs[verb.adapter_id]
        del self._kind_of(verb)[verb.adapter_id]
        self.begun_count -= verb.has_begun

    def next_verb(self) -> ReadyVerb:
        """Return the oldest verb; while a verb has begun, skip the large verbs that have not begun.

        If all large verbs took turns, their adapters would stay in memory until nearly all verbs were complete.
        """
        verbs = iter(self.verbs.values())
        return next(verbs) if not self.begun_count else next(v for v in verbs if v.adapter_id not in self.large)

    def _kind_of(self, verb: ReadyVerb) -> dict[str, ReadyVerb]:
        """Return the dictionary of the verb's kind. A verb without a key runs in one call, and is never large."""
        if verb.batch_key is None or verb.token_count <= self.batch_tokens:
            return self.by_key.setdefault(verb.batch_key, {})
        return self.large_begun if verb.has_begun else self.large


class Scheduler:
    """Orders the ready verbs, and selects the verbs of the next batch."""

    def __init__(self, *, batch_tokens: int, weights: Mapping[str, float] | None = None) -> None:
        """Initialize without verbs.

        Args:
            batch_tokens: Maximum number of tokens per batch, which is one pass; a larger verb runs in several batches.
            weights: Share of each tenant, positive; 1 for tenants that are not listed.
        """
        self._max_batch_tokens = batch_tokens
        self._batch_tokens = batch_tokens
        """Current batch size, see `bound`."""
        self._weights = dict(weights or {})
        self._verbs: dict[str, ReadyVerb] = {}
        self._heavy_count = 0
        """Number of ready verbs with tokens."""
        self.token_count = 0
        """Number of tokens of all ready verbs."""
        self._quick: dict[str, dict[str, ReadyVerb]] = {}
        """Verbs without tokens by tenant, in the order in which tenants are served."""
        self._quick_run = 0
        """Current number of consecutive quick verbs."""
        self._tenants: dict[str, _Tenant] = {}
        """Tenants in the order in which they are served. An idle tenant is removed once its credit is restored."""

    def __len__(self) -> int:
        """Return the number of ready verbs."""
        return len(self._verbs)

    def next_pass(self) -> NextPass | None:
        """Return the size of a batch that would run now; None if a quick verb or no verb is ready."""
        if self._quick or not self._verbs:
            return None
        tenant_count = sum(bool(tenant.verbs) for tenant in self._tenants.values())
        limit = self._batch_tokens * tenant_count if tenant_count > 1 else self._max_batch_tokens
        return NextPass(
            token_count=min(self.token_count, self._max_batch_tokens),
            is_full=self.token_count >= min(limit, self._max_batch_tokens),
        )

    def bound(self, token_count: int | None) -> None:
        """Limit the size of future batches to about `token_count` tokens; None restores the initial limit.

        The limit applies while several tenants wait. Each tenant with credit may have one verb beyond it. A batch
        that contained all ready verbs would serve tenants in proportion to their load, so that tenants with many
        adapters would slow down the others.
        """
        limit = self._max_batch_tokens
        self._batch_tokens = limit if token_count is None else min(limit, max(MIN_BATCH_TOKENS, token_count))
        # Credit from larger batches would delay new tenants for a long time.
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
            self._tenants[verb.tenant_id] = _Tenant(weight, weight * self._batch_tokens, self._max_batch_tokens)
        self._tenants[verb.tenant_id].add(verb)

    def charge(self, verb: ReadyVerb, token_count: int) -> None:
        """Charge a tenant for the tokens of a verb that have run, instead of the estimate of `pass_tokens_of`.

        Call it after the pass, unless the pass failed.
        """
        tenant = self._tenants.get(verb.tenant_id)
        if tenant is not None:
            credit = tenant.credit + self.pass_tokens_of(verb) - token_count
            tenant.credit = min(credit, tenant.weight * self._batch_tokens)

    def remove(self, adapter_id: str) -> ReadyVerb | None:
        """Withdraw and return an adapter's verb; return None if the adapter has no ready verb."""
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
        """Remove and return the verbs of the next batch; the list is empty if no verb is ready."""
        first = self._next_quick() or self._next_heavy()
        if first is None:
            return []
        batch = [self._take(first)]
        if first.token_count and first.batch_key is not None:
            self._fill(batch)
        return batch

    def pass_tokens_of(self, verb: ReadyVerb) -> int:
        """Return the approximate number of tokens of a verb's next pass. A verb without a key runs in one call."""
        return verb.token_count if verb.batch_key is None else min(verb.token_count, self._max_batch_tokens)

    def ahead_of(self, adapter_id: str) -> VerbsAhead | None:
        """Simulate the queue, and return the verbs that run before an adapter's verb; None if it has no ready verb.

        After `MAX_SIMULATED_BATCHES`, all other verbs count as earlier ones.
        """
        if adapter_id not in self._verbs:
            return None
        future, batches = self._copy(), list[list[ReadyVerb]]()
        for _ in range(MAX_SIMULATED_BATCHES):
            batch = future.next_batch()
            if any(verb.adapter_id == adapter_id for verb in batch):
                break
            batches.append([future._run_one_pass(verb) for verb in batch])  # noqa: SLF001 - a copy of itself
        else:
            future.remove(adapter_id)
            batches += [list(future._verbs.values())] if len(future) else []  # noqa: SLF001
        heavy = [batch for batch in batches if any(verb.token_count for verb in batch)]
        return VerbsAhead(
            quick_count=len(batches) - len(heavy),
            heavy_count=len({verb.adapter_id for batch in heavy for verb in batch}),
            batch_count=len(heavy),
            token_count=sum(verb.token_count for batch in heavy for verb in batch),
        )

    def _run_one_pass(self, verb: ReadyVerb) -> ReadyVerb:
        """Simulate a pass: return the part of a verb that runs in it, and add the rest."""
        token_count = self.pass_tokens_of(verb)
        if token_count < verb.token_count:
            self.add(replace(verb, token_count=verb.token_count - token_count, has_begun=True))
        return replace(verb, token_count=token_count)

    def _copy(self) -> 'Scheduler':
        copied = Scheduler(batch_tokens=self._max_batch_tokens, weights=self._weights)
        copied._batch_tokens = self._batch_tokens
        copied._verbs = dict(self._verbs)
        copied._heavy_count, copied.token_count = self._heavy_count, self.token_count
        copied._quick_run = self._quick_run
        copied._quick = {tenant_id: dict(verbs) for tenant_id, verbs in self._quick.items()}
        copied._tenants = {tenant_id: tenant.copy() for tenant_id, tenant in self._tenants.items()}
        return copied

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
                    return tenant.next_verb()
            self._begin_round()
        return None

    def _fill(self, batch: list[ReadyVerb]) -> None:
        """Add verbs that may run with the first one: one of each tenant, and more within the limit of `bound`."""
        first, key = batch[0], batch[0].batch_key
        others = [tenant for tenant_id, tenant in self._tenants.items() if tenant_id != first.tenant_id]
        is_limited = any(tenant.verbs for tenant in others)
        capacity = max(self._max_batch_tokens - first.token_count, 0)
        token_count = first.token_count + self._add_one_each(batch, key, others, capacity)
        limit = self._batch_tokens if is_limited else self._max_batch_tokens
        capacity = max(limit - token_count, 0)
        while capacity:
            added = self._add_one_each(batch, key, list(self._tenants.values()), capacity)
            capacity -= added
            if not added and not self._begin_round():
                return

    def _add_one_each(self, batch: list[ReadyVerb], key: str | None, tenants: Sequence[_Tenant], capacity: int) -> int:
        """Add one verb of each tenant with credit, up to `capacity` tokens in total; return the number of tokens."""
        remaining = capacity
        for tenant in tenants:
            verb = next(iter(tenant.by_key.get(key, {}).values()), None)
            if verb is not None and tenant.credit > 0 and verb.token_count <= remaining:
                batch.append(self._take(verb))
                remaining -= verb.token_count
        return capacity - remaining

    def _take(self, verb: ReadyVerb) -> ReadyVerb:
        """Remove a selected verb, charge its tenant, and move the tenant to the end of the order."""
        if verb.token_count:
            self._tenants[verb.tenant_id].credit -= self.pass_tokens_of(verb)
            self._tenants[verb.tenant_id] = self._tenants.pop(verb.tenant_id)
        else:
            self._quick[verb.tenant_id] = self._quick.pop(verb.tenant_id)
        self.remove(verb.adapter_id)
        return verb

    def _begin_round(self) -> bool:
        """Start a new round if all waiting tenants have spent their credit; return whether a round was started.

        If one round does not give any tenant positive credit, the credit of several rounds is added at once.
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
