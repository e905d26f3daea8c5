"""Sampling on the fleet for the OpenAI API, with the responses to several prompts merged into one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from contextlib import aclosing

from services.gateway.errors import NoReplica
from services.gateway.fleet.members import Membership
from services.gateway.sampling.convert import describe_request_from_bytes, sample_request_from_bytes
from services.gateway.sampling.sampling import Sampling
from services.kit.caller import Caller
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.server.v1 import server_service_pb2

_SERVICE = 'sampler'
_QUEUE_EVENTS = 64
"""Events queued for the reader of a request with several prompts."""


class FleetSamplers:
    """Samples on the fleet, in the same way as the gateway's SamplerService."""

    def __init__(
        self,
        sampling: Sampling,
        membership: Membership,
        *,
        describe: Callable[[], Awaitable[server_service_pb2.ServiceInfo]],
    ) -> None:
        """Sample with `sampling`.

        Args:
            sampling: Chooses a replica, and continues on another one when it is lost.
            membership: Replicas of the fleet.
            describe: Returns the base models and limits that the fleet reports.
        """
        self._sampling = sampling
        self._membership = membership
        self._describe = describe

    async def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        """Yield the response. Closing the generator cancels the sampling; a slow reader delays it.

        Raises:
            DomainError: An error of the SamplerService contract.
        """
        order = sample_request_from_bytes(request.SerializeToString())
        async with aclosing(self._sampling.sample(caller, order)) as responses:
            async for response in responses:
                yield wire.SampleResponse.FromString(response.message)

    async def describe_tokens(self, caller: Caller, request: wire.DescribeTokensRequest) -> wire.DescribeTokensResponse:
        """Return the text of tokens.

        Raises:
            DomainError: An error of the SamplerService contract.
        """
        order = describe_request_from_bytes(request.SerializeToString())
        return wire.DescribeTokensResponse.FromString(await self._sampling.call_one(caller, order))

    def base_model_names(self) -> Sequence[str]:
        """Return the names of the base models that can be sampled, sorted; recently lost replicas count.

        Raises:
            Unavailable: The fleet serves no base model.
        """
        # A request for a model of a lost replica waits a moment for the replica to return.
        reports = [replica.report for replica in self._membership.fleet.replicas()]
        shared = [report for report in reports if report.service == _SERVICE and not report.followed_run]
        names = sorted({name for report in shared for name in report.base_models})
        if not names:
            raise NoReplica(_SERVICE)
        return names

    async def base_models(self) -> Sequence[server_service_pb2.BaseModelInfo]:
        """Return the base models that can be sampled, by name.

        Raises:
            Unavailable: The fleet serves no base model.
        """
        info = await self._describe()
        found = {model.base_model: model for model in info.base_models}
        return [found.get(name, server_service_pb2.BaseModelInfo(base_model=name)) for name in self.base_model_names()]


IndexedResponse = tuple[int, wire.SampleResponse]
"""Index of a prompt, and a response to it."""


async def sample_all(
    samplers: FleetSamplers, caller: Caller, requests: Sequence[wire.SampleRequest]
) -> AsyncGenerator[IndexedResponse, None]:
    """Yield the responses to all requests as they arrive; the first failure cancels the rest."""
    if len(requests) == 1:
        async with aclosing(samplers.sample(caller, requests[0])) as responses:
            async for response in responses:
                yield 0, response
        return
    queue: asyncio.Queue[IndexedResponse] = asyncio.Queue(_QUEUE_EVENTS)

    async def read(index: int, request: wire.SampleRequest) -> None:
        async with aclosing(samplers.sample(caller, request)) as responses:
            async for response in responses:
                await queue.put((index, response))

    async def read_all() -> None:
        async with asyncio.TaskGroup() as readers:
            for index, request in enumerate(requests):
                readers.create_task(read(index, request))

    reading = asyncio.create_task(read_all())
    try:
        async for item in _until_done(queue, reading):
            yield item
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _until_done(
    queue: asyncio.Queue[IndexedResponse], reading: asyncio.Task[None]
) -> AsyncGenerator[IndexedResponse, None]:
    while not (reading.done() and queue.empty()):
        if not queue.empty():
            yield queue.get_nowait()
            continue
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # A cancelled `get` loses no item, so this also cleans up when the client disconnects.
            getting.cancel()
        if getting.done():
            yield getting.result()
