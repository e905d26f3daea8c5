"""Follow how busy the engine is."""

import asyncio
from collections.abc import AsyncGenerator
from datetime import timedelta

from services.sampler.application.get_load import GetLoad
from services.sampler.domain.generation import EngineLoad


class WatchLoad:
    """Yields the load again and again until closed."""

    def __init__(self, get_load: GetLoad) -> None:
        """Yield what `get_load` returns."""
        self._get_load = get_load

    async def __call__(self, interval: timedelta) -> AsyncGenerator[EngineLoad, None]:
        """Yield the load now, and every `interval` from then on."""
        while True:
            yield await self._get_load()
            await asyncio.sleep(interval.total_seconds())
