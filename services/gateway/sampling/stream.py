"""Streamed completions of one prompt, continued on another sampler when the first one fails."""

from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import replace

from services.gateway.fleet.rules import Replica
from services.gateway.sampling.dispatch import Attempt, Dispatch
from services.gateway.sampling.grpc import SamplerClient
from services.gateway.sampling.rules import Progress, SampleChunk, SampleRequest
from services.gateway.sampling.running import RunningRequest
from services.kit.errors import DomainError, ServiceUnreachable
from services.kit.ids import new_id


class SampleStream:
    """One Sample request. The next sampler continues from the tokens that were delivered."""

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
        self._progress = Progress(request.key.weight)

    async def chunks(self) -> AsyncGenerator[SampleChunk, None]:
        """Yield the chunks of the response, none lost or repeated. Closing the generator cancels the sampler's call.

        Raises:
            NoReplica: No replica can start or continue the response.
            DomainError: The sampler's error.
        """
        while not self._progress.is_complete:
            async with aclosing(self._next_part()) as chunks:
                async for chunk in chunks:
                    yield chunk

    async def _next_part(self) -> AsyncGenerator[SampleChunk, None]:
        """Yield the chunks of the next replica, or the end of an aborted request."""
        replica = await self._running.unless_aborted(self._dispatch.find(self._attempt))
        if replica is None:
            for chunk in self._samplers.aborted(self._progress):
                self._progress.record(chunk)
                yield chunk
            return
        async with aclosing(self._from(replica)) as chunks:
            async for chunk in chunks:
                yield chunk
        self._request = replace(self._request, request_id=new_id('rq'), is_renamed=True)

    async def _from(self, replica: Replica) -> AsyncGenerator[SampleChunk, None]:
        """Yield the chunks of one replica; return early where another replica may continue.

        Raises:
            DomainError: The caller must see the error.
        """
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
                async with aclosing(incoming):
                    async for chunk in incoming:
                        is_new = progress.record(chunk)
                        if not attempt.is_answering:
                            self._note_success(replica)
                        if is_new:
                            yield chunk
            if not progress.is_complete:
                raise ServiceUnreachable('sampler')
        except DomainError as error:
            self._dispatch.record_failure(attempt, replica, error)

    def _note_success(self, replica: Replica) -> None:
        """Record the first chunks of a replica, up to its first token."""
        fleet, progress, adapter = self._dispatch.membership.fleet, self._progress, self._request.key.adapter
        fleet.note_success(replica.replica_id)
        self._attempt.advance(has_tokens=progress.has_tokens)
        if adapter is not None and progress.version is not None:
            fleet.note_resident(replica.replica_id, adapter.adapter_id, progress.version)
