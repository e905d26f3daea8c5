"""Tests of transactions with cancelled callers, on each database."""

import asyncio

from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock

ROUNDS = 80
"""Number of moments at which a caller is cancelled, in iterations of the event loop."""


async def test_cancelled_callers_leave_no_lock(database_url: str) -> None:
    """Another connection can write immediately after a cancellation at any step."""
    first, second = await Database.open(database_url), await Database.open(database_url)
    moment = FakeClock().now()

    async def add(database: Database, name: str) -> None:
        store = SqlTenantStore(database)
        await store.add_if_absent(Tenant(tenant_id=name, display_name='', create_time=moment))
        await store.get(name)

    for steps in range(ROUNDS):
        cancelled = [asyncio.create_task(add(first, f'cancelled-{steps}-{number}')) for number in range(3)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in cancelled:
            task.cancel()
        await asyncio.gather(*cancelled, return_exceptions=True)
        # If a cancelled caller left a lock, this write would wait longer than the test's timeout.
        await add(second, f'other-{steps}')
        assert await SqlTenantStore(first).get(f'other-{steps}') is not None
    for database in (first, second):
        await database.close()
