"""Follow how busy the engine is."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

from services.kit.errors import Draining
from services.sampler.application.get_load import GetLoad
from services.sampler.domain.generation import EngineLoad


class WatchLoad:
    """Yields the load again and again until closed."""

    def __init__(self, get_load: GetLoad) -> None:
        """Yield what `get_load` returns."""
        self._get_load = get_load
        self._closed = asyncio.Event()

    async def __call__(self, interval: timedelta) -> AsyncGenerator[EngineLoad, None]:
        """Yield the load now, and every `interval` from then on.

        Raises:
            Draining: the service ends.
        """
        while not self._closed.is_set():
            yield await self._get_load()
            try:
                async with asyncio.timeout(interval.total_seconds()):
                    await self._closed.wait()
            except TimeoutError:
                continue
        raise Draining()

    def close(self) -> None:
        """End every watch: by themselves they would hold up the end of the service."""
        self._closed.set()
