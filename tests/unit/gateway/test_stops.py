"""A gateway that stops: nothing spins and nothing is waited for without end."""

import asyncio

import pytest

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from fixtures.futures import running_desk
from services.kit.errors import Draining, ServiceUnreachable


class LanesAway(MemoryFutureStore):
    """Keeps futures, and is away where it is asked for lanes."""

    def __init__(self) -> None:
        """Begin empty, and away."""
        super().__init__()
        self.is_away = True
        self.was_asked = asyncio.Event()

    async def next_position(self, tenant_id: str, lane: str) -> int:
        """Refuse."""
        if self.is_away:
            self.was_asked.set()
            raise ServiceUnreachable('database')
        return await super().next_position(tenant_id, lane)


async def test_stop_waits_for_no_database_and_what_was_kept_is_carried_on_with() -> None:
    """Who asked is refused, and the next process carries it out."""
    store, payloads = LanesAway(), MemoryPayloadStore()
    async with running_desk(stores=(store, payloads)) as desk:
        asking = asyncio.create_task(desk.submit('one', lane='ad-1'))
        await store.was_asked.wait()
        async with asyncio.timeout(20):
            await desk.verbs.close()
        with pytest.raises(Draining):
            await asking
    store.is_away = False
    [kept] = store.futures.values()
    async with running_desk(stores=(store, payloads)) as after:
        assert await after.outcome(kept) == b'eno'
