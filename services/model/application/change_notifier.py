"""Telling tasks that something changed, without knowing who waits."""

import asyncio


class ChangeNotifier:
    """Wakes everyone who waits at this moment. For one event loop."""

    def __init__(self) -> None:
        """Begin with nobody waiting."""
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all that wait; who comes later waits for the next change."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Return at the next change."""
        await self._next.wait()
