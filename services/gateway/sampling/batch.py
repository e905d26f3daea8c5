"""Divides batches of prompts over the fleet, uses one adapter version for all of them, and retries failed prompts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import ExitStack, aclosing
from dataclasses import replace
from typing import cast

from twinkle_services.gateway.fleet.rules import Replica
from twinkle_services.gateway.sampling.dispatch import Dispatch
from twinkle_services.gateway.sampling.grpc import SamplerClient, aborted_results
from twinkle_services.gateway.sampling.rules import BatchPart, BatchRequest, PromptResult
from twinkle_services.gateway.sampling.slots import Slot
from twinkle_services.gateway.sampling.streams import RunningRequest
from twinkle_services.gateway.sampling.suspects import Attempt
from twinkle_services.kit.errors import DomainError, ServiceUnreachable
from twinkle_services.kit.ids import new_id

Scores = list[tuple[tuple[int, ...], bytes]]
"""ComputeLogprobsResponses, each with the indices of its sequences in the batch."""
_KEYS_AT_ONCE = 64
"""Number of prompts that are routed before the event loop runs other tasks."""


class BatchDivision:
    """Resolves the adapter version of a batch, and divides its prompts over replicas."""

    def __init__(self, dispatch: Dispatch, samplers: SamplerClient) -> None:
        self.dispatch = dispatch
        self.samplers = samplers

    async def resolve_version(self, request: BatchRequest, batch: Attempt) -> int | None:
        """Return the version that one replica chooses and loads for all prompts; None if no choice is necessary.

        Raises:
            DomainError: the sampler's error, or no replica is available.
        """
        if not request.is_version_open:
            return None
        attempt = replace(batch, tried=set(batch.tried))
        while True:
            replica = await self.dispatch.find(attempt)
            try:
                with self.dispatch.track(replica, attempt):
                    version = await self.samplers.resolve(replica.address, request, deadline=attempt.deadline)
            except DomainError as error:
                self.dispatch.record_failure(attempt, replica, error)
                continue
            if (adapter := request.keys[0].adapter) is not None:
                self.dispatch.membership.fleet.note_resident(replica.replica_id, adapter.adapter_id, version)
            # The batch is not finished, so it keeps its failures and its turn.
            batch.consecutive_failures, batch.turn = attempt.consecutive_failures, attempt.turn
            return version

    async def divide(self, part: BatchPart, attempt: Attempt) -> list[tuple[Replica, BatchPart]]:
        """Return the replicas for the prompts of `part`, each with its share of the prompts.

        Raises:
            DomainError: see `Dispatch.find`.
        """
        first = await self.dispatch.find(attempt)
        groups: dict[str, tuple[Replica, list[int]]] = {}
        with ExitStack() as counted:
            for number, position in enumerate(part.positions):
                key = part.request.keys[position]
                replica = self.dispatch.membership.find_for(key, excluded=attempt.tried) or first
                counted.enter_context(self.dispatch.membership.track_sequences(replica, key.weight))
                groups.setdefault(replica.replica_id, (replica, []))[1].append(position)
                if number % _KEYS_AT_ONCE == _KEYS_AT_ONCE - 1:
                    await asyncio.sleep(0)
        return [(replica, _subset(part, positions)) for replica, positions in groups.values()]


class BatchCompletion:
    """One SampleBatch request. If a sampler fails, other samplers complete its unfinished prompts."""

    def __init__(
        self, division: BatchDivision, request: BatchRequest, *, attempt: Attempt, running: RunningRequest
    ) -> None:
        self._division = division
        self._request = request
        self._attempt = attempt
        self._running = running
        self._tasks = asyncio.TaskGroup()
        self._results: asyncio.Queue[PromptResult] = asyncio.Queue(maxsize=1)
        """One result at a time, so that a slow reader slows the samplers down."""

    async def results(self) -> AsyncGenerator[PromptResult, None]:
        """Yield the results in the order in which they finish. Closing the generator cancels all calls.

        Raises:
            DomainError: a sampler's error, or no replica is available.
        """
        work = asyncio.create_task(self._work())
        try:
            for _ in self._request.keys:
                yield await _next_result(self._results, work)
        except BaseExceptionGroup as group:
            raise _first_error(group) from None
        finally:
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)

    async def _work(self) -> None:
        async with self._tasks:
            resolving = self._division.resolve_version(self._request, self._attempt)
            version = await self._running.unless_aborted(resolving)
            await self._start(_all_of(self._request, version), self._attempt)

    async def _start(self, part: BatchPart, attempt: Attempt) -> None:
        """Distribute a part over the replicas. If the request was aborted, finish the part without a replica."""
        shares = await self._running.unless_aborted(self._division.divide(part, attempt))
        if shares is None:
            for result in aborted_results(part):
                await self._results.put(result)
            return
        for replica, share in shares:
            self._tasks.create_task(self._run(replica, share, replace(attempt, tried=set(attempt.tried))))

    async def _run(self, replica: Replica, part: BatchPart, attempt: Attempt) -> None:
        """Wait for a slot, forward the results of a replica, and restart the prompts that have no result."""
        unfinished = dict.fromkeys(part.positions)
        dispatch = self._division.dispatch
        try:
            with (
                dispatch.reserve(replica, attempt, part.sequence_count) as slot,
                self._running.part(part.request_id or part.request.request_id, replica.address),
            ):
                if not slot.is_granted:
                    await self._running.unless_aborted(slot.wait())
                # The part is not sent if the request was aborted meanwhile, because no replica would abort the part.
                if not self._running.aborted.is_set():
                    await self._pass_on(replica, part, attempt=attempt, slot=slot, unfinished=unfinished)
        except DomainError as error:
            dispatch.record_failure(attempt, replica, error)
            # The failed sampler had started the request, so the request waits longer for another sampler.
            if attempt.consecutive_failures:
                attempt.start()
            part = replace(part, positions=tuple(unfinished), is_retry=True)
        if unfinished:
            await self._start(part, attempt)

    async def _pass_on(
        self, replica: Replica, part: BatchPart, *, attempt: Attempt, slot: Slot, unfinished: dict[int, None]
    ) -> None:
        """Forward the results of a replica, and remove the indices of their prompts from `unfinished`."""
        dispatch = self._division.dispatch
        results = self._division.samplers.complete(replica.address, part, deadline=attempt.deadline)
        async with aclosing(results):
            async for result in results:
                del unfinished[result.position]
                dispatch.slots.finish(slot, part.request.keys[result.position].weight)
                dispatch.record_success(attempt, replica, has_tokens=True)
                await self._results.put(result)
        if unfinished:
            raise ServiceUnreachable('sampler')


class BatchScoring:
    """One ComputeLogprobs request. If a replica fails, other replicas score its sequences."""

    def __init__(self, division: BatchDivision, request: BatchRequest) -> None:
        self._division = division
        self._request = request

    async def scores(self, attempt: Attempt) -> Scores:
        """Return the responses; together they cover each sequence once.

        Raises:
            DomainError: a sampler's error, or no replica is available.
        """
        version = await self._division.resolve_version(self._request, attempt)
        return await self._score(_all_of(self._request, version), attempt)

    async def _score(self, part: BatchPart, attempt: Attempt) -> Scores:
        shares = await self._division.divide(part, attempt)
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [
                    group.create_task(self._score_at(replica, share, replace(attempt, tried=set(attempt.tried))))
                    for replica, share in shares
                ]
        except BaseExceptionGroup as errors:
            raise _first_error(errors) from None
        return [score for task in tasks for score in task.result()]

    async def _score_at(self, replica: Replica, part: BatchPart, attempt: Attempt) -> Scores:
        dispatch = self._division.dispatch
        try:
            with dispatch.reserve(replica, attempt, part.sequence_count) as slot:
                await slot.wait()
                response = await self._division.samplers.score(replica.address, part, deadline=attempt.deadline)
        except DomainError as error:
            dispatch.record_failure(attempt, replica, error)
            return await self._score(part, attempt)
        dispatch.record_success(attempt, replica, has_tokens=True)
        return [(part.positions, response)]


def _all_of(request: BatchRequest, version: int | None) -> BatchPart:
    return BatchPart(request=request, positions=tuple(range(len(request.keys))), version=version)


def _subset(part: BatchPart, positions: list[int]) -> BatchPart:
    """Return a subset of a part under a new id; a complete batch keeps its id at the first attempt."""
    is_all = len(positions) == len(part.request.keys) and not part.is_retry
    return replace(part, positions=tuple(positions), request_id='' if is_all else new_id('rq'))


def _first_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """Return the error that terminated a task group."""
    first = group.exceptions[0]
    if isinstance(first, BaseExceptionGroup):
        return _first_error(cast('BaseExceptionGroup[BaseException]', first))
    return first


async def _next_result(results: asyncio.Queue[PromptResult], work: asyncio.Task[None]) -> PromptResult:
    """Return the next result, or raise the error of `work`."""
    pending = asyncio.ensure_future(results.get())
    try:
        await asyncio.wait({pending, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return await pending
    finally:
        pending.cancel()
