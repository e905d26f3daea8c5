"""Sampling within quotas, counted as it is passed on."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace
from datetime import timedelta

from services.gateway.quotas.book import QuotaBook
from services.gateway.quotas.meter import UsageMeter
from services.gateway.quotas.rates import TokenRates
from services.gateway.quotas.usage import Work
from services.gateway.sampling.compute_logprobs import Scores
from services.gateway.sampling.rules import BatchOrder, Piece, PieceKind, PromptAnswer, SampleOrder
from services.gateway.sampling.sampling_verbs import (
    ComputesLogprobs,
    SamplesBatches,
    SamplesPrompts,
    SamplingVerbs,
)
from services.kit.caller import Caller
from services.kit.errors import QuotaExceeded
from services.kit.ids import new_id

NAME = 'concurrent_samples'
BUSY = timedelta(seconds=1)
"""When another request may be let in, as far as can be told."""


class SamplePlaces:
    """Counts requests; whoever enters one leaves it again, and it is counted until the last one has."""

    def __init__(self) -> None:
        """Begin with none."""
        self._held: dict[str, Counter[str]] = {}

    def count(self, tenant_id: str) -> int:
        """Return how many of a tenant's are under way."""
        return len(self._held.get(tenant_id, ()))

    def holds(self, tenant_id: str, key: str) -> bool:
        """Whether this one is."""
        return key in self._held.get(tenant_id, ())

    def enter(self, tenant_id: str, key: str) -> None:
        """Count a request."""
        self._held.setdefault(tenant_id, Counter())[key] += 1

    def leave(self, tenant_id: str, key: str) -> None:
        """Count it no more; one that is not counted is no error."""
        held = self._held.get(tenant_id)
        if held is None or key not in held:
            return
        held[key] -= 1
        if not held[key]:
            del held[key]
        if not held:
            del self._held[tenant_id]


class SamplingGate:
    """Lets requests in."""

    def __init__(self, book: QuotaBook, rates: TokenRates, places: SamplePlaces, *, patience: timedelta) -> None:
        """Hold tenants to what `book` says.

        Args:
            book: knows quotas.
            rates: knows who owes tokens.
            places: counts requests; also those of futures.
            patience: how long a request waits at most until its tenant owes nothing.
        """
        self._book = book
        self._rates = rates
        self.places = places
        self._patience_seconds = patience.total_seconds()

    def check(self, tenant_id: str, key: str) -> None:
        """Let a request in that is answered later; one that is in already is never refused.

        Raises:
            QuotaExceeded: there are as many under way as may be, or tokens are owed; with the time to try again.
        """
        if self.places.holds(tenant_id, key):
            return
        limit = self._book.of(tenant_id).concurrent_samples
        if limit is not None and self.places.count(tenant_id) >= limit:
            raise QuotaExceeded(NAME, limit, BUSY)
        self._rates.check(tenant_id)

    @asynccontextmanager
    async def sampling(self, tenant_id: str, *, deadline: float | None) -> AsyncIterator[None]:
        """Let a request run during the block.

        Args:
            tenant_id: whose it is.
            deadline: on the event loop's clock.

        Raises:
            QuotaExceeded: as `check`; where little is owed, only after that was waited for.
        """
        key, patience = new_id('sp'), self._patience_seconds
        limit = self._book.of(tenant_id).concurrent_samples
        if limit is not None and self.places.count(tenant_id) >= limit:
            raise QuotaExceeded(NAME, limit, BUSY)
        self.places.enter(tenant_id, key)
        try:
            if deadline is not None:
                patience = min(patience, max(0.0, deadline - asyncio.get_running_loop().time()))
            await self._rates.enter(tenant_id, patience_seconds=patience)
            yield
        finally:
            self.places.leave(tenant_id, key)


class LimitedSample:
    """Streams one prompt's completions within quotas."""

    def __init__(self, sample: SamplesPrompts, gate: SamplingGate, meter: UsageMeter) -> None:
        """Do as `sample` does, where `gate` lets it; `meter` counts."""
        self._sample = sample
        self._gate = gate
        self._meter = meter

    async def __call__(
        self, caller: Caller, order: SampleOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer.

        Raises:
            QuotaExceeded: the tenant may not sample now.
            DomainError: as `sample.Sample`.
        """
        run_id = order.key.run_id
        async with (
            self._gate.sampling(caller.tenant_id, deadline=deadline),
            aclosing(self._sample(caller, order, deadline=deadline)) as pieces,
        ):
            async for piece in pieces:
                if piece.kind is PieceKind.PROMPT:
                    work = Work(prompt_token_count=piece.prompt_token_count, prompt_count=1)
                    self._meter.count(caller.tenant_id, run_id, work)
                elif piece.token_data:
                    self._meter.count(caller.tenant_id, run_id, Work(sampled_token_count=len(piece.token_data) // 4))
                yield piece


class LimitedSampleBatch:
    """Completes many prompts within quotas."""

    def __init__(self, sample_batch: SamplesBatches, gate: SamplingGate, meter: UsageMeter) -> None:
        """Do as `sample_batch` does, where `gate` lets it; `meter` counts."""
        self._sample_batch = sample_batch
        self._gate = gate
        self._meter = meter

    async def __call__(
        self, caller: Caller, order: BatchOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[PromptAnswer, None]:
        """Yield the answers.

        Raises:
            QuotaExceeded: the tenant may not sample now.
            DomainError: as `sample_batch.SampleBatch`.
        """
        async with (
            self._gate.sampling(caller.tenant_id, deadline=deadline),
            aclosing(self._sample_batch(caller, order, deadline=deadline)) as answers,
        ):
            async for answer in answers:
                self._meter.count(caller.tenant_id, order.keys[0].run_id, work_of(answer))
                yield answer


class LimitedLogprobs:
    """Scores sequences within quotas."""

    def __init__(self, compute: ComputesLogprobs, gate: SamplingGate, meter: UsageMeter) -> None:
        """Do as `compute` does, where `gate` lets it; `meter` counts."""
        self._compute = compute
        self._gate = gate
        self._meter = meter

    async def __call__(self, caller: Caller, order: BatchOrder, *, deadline: float | None = None) -> Scores:
        """Return the answers.

        Raises:
            QuotaExceeded: the tenant may not sample now.
            DomainError: as `compute_logprobs.ComputeLogprobs`.
        """
        async with self._gate.sampling(caller.tenant_id, deadline=deadline):
            scores = await self._compute(caller, order, deadline=deadline)
        work = Work(prompt_token_count=order.token_count, prompt_count=len(order.keys))
        self._meter.count(caller.tenant_id, order.keys[0].run_id, work)
        return scores


def limited_sampling(verbs: SamplingVerbs, gate: SamplingGate, meter: UsageMeter) -> SamplingVerbs:
    """Return the verbs of sampling held to quotas and counted."""
    return replace(
        verbs,
        sample=LimitedSample(verbs.sample, gate, meter),
        sample_batch=LimitedSampleBatch(verbs.sample_batch, gate, meter),
        compute_logprobs=LimitedLogprobs(verbs.compute_logprobs, gate, meter),
    )


def work_of(answer: PromptAnswer) -> Work:
    """Return what the completions of one prompt took."""
    return Work(
        prompt_token_count=answer.prompt_token_count,
        sampled_token_count=answer.sampled_token_count,
        prompt_count=1,
    )
