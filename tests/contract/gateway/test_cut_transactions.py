"""Transactions whose caller goes away in the middle, on each database."""

import asyncio

from services.gateway.keys.sql_tenants import SqlTenantStore
from services.gateway.keys.tenant import Tenant
from services.gateway.store.database import Database
from services.kit.clock import FakeClock

ROUNDS = 80


async def test_callers_that_go_away_lock_nobody_out(database_url: str) -> None:
    """Cut off after any number of steps, a transaction is kept or undone, and another connection writes at once."""
    here, there = await Database.open(database_url), await Database.open(database_url)
    moment = FakeClock().now()

    async def add(database: Database, name: str) -> None:
        store = SqlTenantStore(database)
        await store.add_if_absent(Tenant(tenant_id=name, display_name='', create_time=moment))
        await store.get(name)

    for steps in range(ROUNDS):
        cut = [asyncio.create_task(add(here, f'cut-{steps}-{number}')) for number in range(3)]
        for _ in range(steps):
            await asyncio.sleep(0)
        for task in cut:
            task.cancel()
        await asyncio.gather(*cut, return_exceptions=True)
        # One that had to wait for a lock that nobody gives back would wait longer than this test may take.
        await add(there, f'other-{steps}')
        assert await SqlTenantStore(here).get(f'other-{steps}') is not None
    for database in (here, there):
        await database.close()
