"""Streams of samples, which continue on another sampler if one fails, and running requests, which can be aborted."""

import asyncio
from collections.abc import AsyncGenerator, Coroutine, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from twinkle_services.gateway.errors import SamplingIdTaken
from twinkle_services.gateway.fleet.rules import Replica
from twinkle_services.gateway.sampling.dispatch import Dispatch
from twinkle_services.gateway.sampling.grpc import SamplerClient, aborted_chunks
from twinkle_services.gateway.sampling.rules import Progress, SampleChunk, SampleRequest
from twinkle_services.gateway.sampling.suspects import Attempt
from twinkle_services.kit.errors import Code, DomainError, ServiceUnreachable
from twinkle_services.kit.ids import new_id

Result = TypeVar('Result')


@dataclass
class RunningRequest:
    """One request of a caller. Several replicas may run parts of the request."""

    parts: dict[str, str] = field(default_factory=dict[str, str])
    """Addresses of the replicas, by the ids of the parts."""
    aborted: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the caller aborts the request."""

    @contextmanager
    def part(self, request_id: str, address: str) -> Iterator[None]:
        """Record, for the duration of the block, that a part runs at `address`."""
        self.parts[request_id] = address
        try:
            yield
        finally:
            del self.parts[request_id]

    async def unless_aborted(self, work: Coroutine[Any, Any, Result]) -> Result | None:
        """Return the result of `work`; cancel it and return None as soon as the request is aborted."""
        working = asyncio.ensure_future(work)
        aborting = asyncio.ensure_future(self.aborted.wait())
        try:
            await asyncio.wait({working, aborting}, return_when=asyncio.FIRST_COMPLETED)
            return None if self.aborted.is_set() else working.result()
        finally:
            working.cancel()
            aborting.cancel()
            await asyncio.gather(working, aborting, return_exceptions=True)


class RunningRequests:
    """Running requests by tenant and the id that the caller chose."""

    def __init__(self) -> None:
        self._named: dict[tuple[str, str], RunningRequest] = {}

    @contextmanager
    def running(self, tenant_id: str, request_id: str) -> Iterator[RunningRequest]:
        """Register a request for the duration of the block. A request without an id cannot be found.

        Raises:
            SamplingIdTaken: a request of the tenant with that id is running.
        """
        key = (tenant_id, request_id)
        if key in self._named:
            raise SamplingIdTaken(request_id)
        request = RunningRequest()
        if not request_id:
            yield request
            return
        self._named[key] = request
        try:
            yield request
        finally:
            del self._named[key]

    def find(self, tenant_id: str, request_id: str) -> RunningRequest | None:
        return self._named.get((tenant_id, request_id))


class SampleStream:
    """One Sample request. If its sampler fails, the next one continues after the tokens that were delivered."""

    def __init__(
        self,
        dispatch: Dispatch,
        samplers: SamplerClient,
        request: SampleRequest,
        *,
        attempt: Attempt,
        running: RunningRequest,
    ) -> None:
        self._dispatch = dispatch
        self._samplers = samplers
        self._request = request
        self._attempt = attempt
        self._running = running
        self._progress = Progress(request)
        self.is_running = False
        """Whether a sampler received the request, and neither refused nor lost it."""

    async def chunks(self) -> AsyncGenerator[SampleChunk, None]:
        """Yield each chunk of the response exactly once. Closing the generator cancels the sampler's call.

        Raises:
            NoReplica: no replica can start or continue the response.
            DomainError: the sampler's error.
        """
        while not self._progress.is_complete:
            replica = await self._running.unless_aborted(self._dispatch.find(self._attempt))
            if replica is None:
                for chunk in aborted_chunks(self._progress):
                    yield chunk
                return
            async with aclosing(self._chunks_of(replica)) as chunks:
                async for chunk in chunks:
                    yield chunk
            self._request = replace(self._request, request_id=new_id('rq'), is_renamed=True)

    async def _chunks_of(self, replica: Replica) -> AsyncGenerator[SampleChunk, None]:
        """Yield the chunks of one replica; return early if another replica may continue or the request is aborted."""
        progress, attempt = self._progress, self._attempt
        incoming = self._samplers.sample(replica.address, self._request, progress=progress, deadline=attempt.deadline)
        try:
            with (
                self._dispatch.reserve(replica, attempt, progress.open_count) as slot,
                self._running.part(self._request.request_id, replica.address),
            ):
                if not slot.is_granted:
                    await self._running.unless_aborted(slot.wait())
                if self._running.aborted.is_set():
                    return
                self.is_running = True
                async with aclosing(incoming):
                    async for chunk in incoming:
                        is_new = progress.record(chunk)
                        if not attempt.is_delivering:
                            self._record_success(replica)
                        if is_new:
                            yield chunk
            if not progress.is_complete:
                raise ServiceUnreachable('sampler')
        except DomainError as error:
            # If the deadline passes, the sampler has computed tokens, as it has if the caller leaves.
            self.is_running = error.code is Code.DEADLINE_EXCEEDED
            self._dispatch.record_failure(attempt, replica, error)

    def _record_success(self, replica: Replica) -> None:
        """Record that a replica responds; called for each chunk up to the first token."""
        fleet, progress, adapter = self._dispatch.membership.fleet, self._progress, self._request.key.adapter
        self._dispatch.record_success(self._attempt, replica, has_tokens=progress.has_tokens)
        if adapter is not None and progress.version is not None:
            fleet.note_resident(replica.replica_id, adapter.adapter_id, progress.version)
