"""Cancellation of a stream that merges the responses to several prompts."""

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from services.gateway.openai.models import sample_all
from services.kit.caller import Caller
from twinkle.api.sampler.v1 import sampler_service_pb2 as wire


class SilentSamplers:
    """Fake samplers that never respond."""

    def __init__(self) -> None:
        self.called = asyncio.Event()
        self.open_count = 0

    async def sample(self, caller: Caller, request: wire.SampleRequest) -> AsyncGenerator[wire.SampleResponse, None]:
        """Wait forever."""
        del caller, request
        self.open_count += 1
        self.called.set()
        try:
            await asyncio.Event().wait()
            yield wire.SampleResponse()
        finally:
            self.open_count -= 1


async def test_cancelled_reader_leaves_no_task() -> None:
    """When the reader of a merged stream is cancelled, sampling of all prompts is cancelled and no task remains."""
    samplers: Any = SilentSamplers()
    before = asyncio.all_tasks()

    async def read() -> None:
        requests = [wire.SampleRequest(), wire.SampleRequest()]
        async with aclosing(sample_all(samplers, Caller(tenant_id='alice'), requests)) as responses:
            async for _ in responses:
                raise AssertionError('no response was expected')

    reading = asyncio.create_task(read())
    await samplers.called.wait()
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before
    assert samplers.open_count == 0
