"""A notifier that wakes the tasks that wait for a change."""

import asyncio


class ChangeNotifier:
    """Wakes all tasks that currently wait. Concurrency: use it from one event loop only."""

    def __init__(self) -> None:
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Wake all waiting tasks; tasks that wait later are woken by the next call."""
        self._next.set()
        self._next = asyncio.Event()

    async def wait(self) -> None:
        """Wait for the next call of `notify`."""
        await self._next.wait()
