"""The verb that completes many prompts, on as many samplers as there are."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field, replace

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.batches import Batches, fact_of
from services.gateway.sampling.failover import Attempt
from services.gateway.sampling.rules import BatchOrder, PromptAnswer, Share
from services.gateway.sampling.running_samples import RunningSample, RunningSamples
from services.gateway.sampling.turns import Place
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError, ServiceUnreachable


@dataclass
class _Course:
    """A SampleBatch on its way."""

    tenant_id: str
    running: RunningSample
    group: asyncio.TaskGroup
    """Owns the tasks, one for each replica's share."""
    answers: asyncio.Queue[PromptAnswer] = field(default_factory=lambda: asyncio.Queue(maxsize=1))
    """One at a time: a slow reader holds the samplers back."""


@dataclass(frozen=True)
class _Part:
    """A share at its replica."""

    attempt: Attempt
    place: Place
    undone: dict[int, None]
    """Places of the prompts that have no answer yet."""


class SampleBatch:
    """Answers with one version throughout; what a sampler left undone is done again by others."""

    def __init__(self, batches: Batches, requests: RunningSamples) -> None:
        """Divide by `batches`."""
        self._batches = batches
        self._requests = requests

    async def __call__(
        self, caller: Caller, order: BatchOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[PromptAnswer, None]:
        """Yield the answers in the order they are finished. Closing the generator ends all calls at once.

        Raises:
            ScopeMissing: the caller may not sample.
            SamplingIdTaken: the caller has a request of that id running.
            NoReplica: nobody is there.
            DomainError: as a sampler says.
        """
        require_scope(caller, 'sample')
        with self._requests.running(caller.tenant_id, order.request_id) as running:
            course = _Course(caller.tenant_id, running, asyncio.TaskGroup())
            work = asyncio.create_task(self._work(order, course, deadline=deadline))
            try:
                for _ in order.keys:
                    yield await _next_answer(course.answers, work)
            except BaseExceptionGroup as group:
                raise fact_of(group) from None
            finally:
                work.cancel()
                await asyncio.gather(work, return_exceptions=True)

    async def _work(self, order: BatchOrder, course: _Course, *, deadline: float | None) -> None:
        async with course.group:
            version = await course.running.unless_aborted(self._batches.version_of(order, deadline=deadline))
            whole = Share(order=order, positions=tuple(range(len(order.keys))), version=version)
            attempt = Attempt(key=order.keys[0], tenant_id=course.tenant_id, deadline=deadline)
            await self._begin(whole, attempt, course)

    async def _begin(self, share: Share, attempt: Attempt, course: _Course) -> None:
        """Have a share answered by whoever is right for its prompts; what was aborted is answered as it is."""
        parts = await course.running.unless_aborted(self._batches.divide(share, attempt))
        if parts is None:
            for answer in self._batches.samplers.aborted_prompts(share):
                await course.answers.put(answer)
            return
        for replica, part in parts:
            own = replace(attempt, tried=set(attempt.tried))
            course.group.create_task(self._from(replica, part, own, course))

    async def _from(self, replica: Replica, share: Share, attempt: Attempt, course: _Course) -> None:
        """Pass on what a replica answers when its turn comes, and begin again with what it left undone.

        Raises:
            DomainError: the caller is to hear it.
        """
        undone = dict.fromkeys(share.positions)
        dispatch = self._batches.dispatch
        try:
            with (
                dispatch.place(replica, attempt, share.weight) as place,
                course.running.part(share.request_id or share.order.request_id, replica.address),
            ):
                if not place.is_given:
                    await course.running.unless_aborted(place.turn())
                # Where it was aborted before, no replica has it yet, so that none could be told.
                if not course.running.aborted.is_set():
                    await self._pass_on(replica, share, _Part(attempt, place, undone), course)
        except DomainError as error:
            dispatch.failed(attempt, replica, error)
            # What a sampler had begun is worth waiting for another one.
            if attempt.bad_ends:
                attempt.begin()
            share = replace(share, positions=tuple(undone), is_again=True)
        if undone:
            await self._begin(share, attempt, course)

    async def _pass_on(self, replica: Replica, share: Share, part: _Part, course: _Course) -> None:
        """Pass on what a replica answers.

        Raises:
            DomainError: it failed, or ended early.
        """
        fleet = self._batches.dispatch.membership.fleet
        answers = self._batches.samplers.complete(replica.address, share, deadline=part.attempt.deadline)
        async with aclosing(answers):
            async for answer in answers:
                del part.undone[answer.position]
                part.place.done(share.order.keys[answer.position].weight)
                fleet.note_success(replica.replica_id)
                part.attempt.went_on(has_tokens=True)
                await course.answers.put(answer)
        if part.undone:
            raise ServiceUnreachable('sampler')


async def _next_answer(answers: asyncio.Queue[PromptAnswer], work: asyncio.Task[None]) -> PromptAnswer:
    """Return the next answer.

    Raises:
        BaseException: what ended `work`.
    """
    coming = asyncio.ensure_future(answers.get())
    try:
        await asyncio.wait({coming, work}, return_when=asyncio.FIRST_COMPLETED)
        if work.done():
            work.result()
        return await coming
    finally:
        coming.cancel()
