"""The verb that streams completions of one prompt, from as many samplers as it takes."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, replace

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.dispatch import Dispatch
from services.gateway.sampling.failover import Attempt
from services.gateway.sampling.ports import Samplers
from services.gateway.sampling.rules import Piece, Progress, SampleOrder
from services.gateway.sampling.running_samples import RunningSample, RunningSamples
from services.kit.authority import require_scope
from services.kit.caller import Caller
from services.kit.errors import DomainError, ServiceUnreachable
from services.kit.ids import new_id


@dataclass
class _Course:
    """A Sample on its way."""

    order: SampleOrder
    progress: Progress
    attempt: Attempt
    running: RunningSample


class Sample:
    """Streams an answer; where its sampler is lost, another one goes on from the tokens that were delivered."""

    def __init__(self, dispatch: Dispatch, samplers: Samplers, requests: RunningSamples) -> None:
        """Call `samplers` as `dispatch` finds them."""
        self._dispatch = dispatch
        self._samplers = samplers
        self._requests = requests

    async def __call__(
        self, caller: Caller, order: SampleOrder, *, deadline: float | None = None
    ) -> AsyncGenerator[Piece, None]:
        """Yield the pieces of the answer, none lost or doubled. Closing the generator ends the sampler's call at once.

        Args:
            caller: who asks; calls to samplers are made on behalf of the current caller.
            order: what is asked.
            deadline: on the event loop's clock.

        Raises:
            ScopeMissing: the caller may not sample.
            SamplingIdTaken: the caller has a request of that id running.
            NoReplica: nobody is there to begin, or to go on.
            DomainError: as the sampler says.
        """
        require_scope(caller, 'sample')
        with self._requests.running(caller.tenant_id, order.request_id) as running:
            attempt = Attempt(key=order.key, tenant_id=caller.tenant_id, deadline=deadline)
            course = _Course(order, Progress(order.key.weight), attempt, running)
            while not course.progress.is_complete:
                async with aclosing(self._next_part(course)) as pieces:
                    async for piece in pieces:
                        yield piece

    async def _next_part(self, course: _Course) -> AsyncGenerator[Piece, None]:
        """Yield what the next replica brings, or the end of an aborted request.

        Raises:
            DomainError: the caller is to hear it.
        """
        replica = await course.running.unless_aborted(self._dispatch.find(course.attempt))
        if replica is None:
            for piece in self._samplers.aborted(course.progress):
                course.progress.take(piece)
                yield piece
            return
        async with aclosing(self._from(replica, course)) as pieces:
            async for piece in pieces:
                yield piece
        course.order = replace(course.order, request_id=new_id('rq'), is_renamed=True)

    async def _from(self, replica: Replica, course: _Course) -> AsyncGenerator[Piece, None]:
        """Yield what one replica brings; return where it ended early and another one may go on.

        Raises:
            DomainError: the caller is to hear it.
        """
        progress, attempt = course.progress, course.attempt
        pieces = self._samplers.sample(replica.address, course.order, progress=progress, deadline=attempt.deadline)
        try:
            with (
                self._dispatch.place(replica, attempt, progress.open_count) as place,
                course.running.part(course.order.request_id, replica.address),
            ):
                if not place.is_given:
                    await course.running.unless_aborted(place.turn())
                if course.running.aborted.is_set():
                    return
                async with aclosing(pieces):
                    async for piece in pieces:
                        is_new = progress.take(piece)
                        if not attempt.is_answering:
                            self._note_life(replica, course)
                        if is_new:
                            yield piece
            if not progress.is_complete:
                raise ServiceUnreachable('sampler')
        except DomainError as error:
            self._dispatch.failed(attempt, replica, error)

    def _note_life(self, replica: Replica, course: _Course) -> None:
        """Take note of what a replica brings first, up to its first token."""
        fleet, progress = self._dispatch.membership.fleet, course.progress
        fleet.note_success(replica.replica_id)
        course.attempt.went_on(has_tokens=progress.has_tokens)
        if course.order.key.adapter is not None and progress.version is not None:
            fleet.note_resident(replica.replica_id, course.order.key.adapter.adapter_id, progress.version)
