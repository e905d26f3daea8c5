"""What this API needs of the samplers behind the gateway, and their answers to many prompts as one stream."""

import asyncio
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing
from typing import Protocol

from services.kit.caller import Caller
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire
from twinkle.api.server.v1 import server_service_pb2

_EVENTS_AHEAD = 64
"""Events of one request that may wait for their reader, where several prompts are sampled at once."""


class Samplers(Protocol):
    """Samples for callers."""

    def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        """Yield the answer. Closing the generator ends the sampling at once; a slow reader holds it back.

        Raises:
            DomainError: as the contract of SamplerService says.
        """
        ...

    async def describe_tokens(self, caller: Caller, request: wire.DescribeTokensRequest) -> wire.DescribeTokensResponse:
        """Return what tokens stand for.

        Raises:
            DomainError: as the contract of SamplerService says.
        """
        ...

    def base_model_names(self) -> Sequence[str]:
        """Return the names of what can be sampled, sorted; also of what is away for a moment.

        Raises:
            Unavailable: nothing is.
        """
        ...

    async def base_models(self) -> Sequence[server_service_pb2.BaseModelInfo]:
        """Return what can be sampled, by name.

        Raises:
            Unavailable: nothing can.
        """
        ...


PlacedResponse = tuple[int, wire.SampleResponse]
"""Which prompt, and what came for it."""


async def sample_all(
    samplers: Samplers, caller: Caller, requests: Sequence[wire.SampleRequest]
) -> AsyncGenerator[PlacedResponse, None]:
    """Yield the answers to all requests as they come; the first failure ends them all."""
    if len(requests) == 1:
        async with aclosing(samplers.sample(caller, requests[0])) as responses:
            async for response in responses:
                yield 0, response
        return
    queue: asyncio.Queue[PlacedResponse] = asyncio.Queue(_EVENTS_AHEAD)

    async def read(place: int, request: wire.SampleRequest) -> None:
        async with aclosing(samplers.sample(caller, request)) as responses:
            async for response in responses:
                await queue.put((place, response))

    async def read_all() -> None:
        async with asyncio.TaskGroup() as readers:
            for place, request in enumerate(requests):
                readers.create_task(read(place, request))

    reading = asyncio.create_task(read_all())
    try:
        async for placed in _until_done(queue, reading):
            yield placed
        await reading
    finally:
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)


async def _until_done(
    queue: asyncio.Queue[PlacedResponse], reading: asyncio.Task[None]
) -> AsyncGenerator[PlacedResponse, None]:
    while not (reading.done() and queue.empty()):
        if not queue.empty():
            yield queue.get_nowait()
            continue
        getting = asyncio.ensure_future(queue.get())
        try:
            await asyncio.wait({getting, reading}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            # Where the client has left, nobody waits for more; what has come already stays.
            getting.cancel()
        if getting.done():
            yield getting.result()
