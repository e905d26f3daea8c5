"""What the service does by itself from time to time."""

import asyncio
from typing import NoReturn

from services.model.application.queues import Queues
from services.model.application.residency import Residency


class Upkeep:
    """Lets go of what nobody asks for. For one event loop."""

    def __init__(self, residency: Residency, queues: Queues) -> None:
        """Use the parts given."""
        self._residency = residency
        self._queues = queues

    async def __call__(self) -> None:
        """Do it once."""
        await self._residency.evict_idle()
        self._queues.drop_idle()

    async def repeat(self, interval_seconds: float) -> NoReturn:
        """Do it again and again, until cancelled."""
        while True:
            await asyncio.sleep(interval_seconds)
            await self()
