"""Tenants in SQL."""

from collections.abc import Sequence

from services.gateway.keys.tables import TenantRow
from services.gateway.keys.tenant import Tenant
from services.gateway.paging import Page
from services.gateway.store.database import Database
from services.gateway.store.statements import (
    as_row,
    fetch_all,
    fetch_one,
    insert_into,
    newest_first,
    select_values,
)


class SqlTenantStore:
    """Keeps tenants."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def add_if_absent(self, tenant: Tenant) -> Tenant:
        """Keep the tenant, or leave the one of that id as it is; return what is kept."""
        query = select_values(TenantRow, Tenant).where(TenantRow.tenant_id == tenant.tenant_id)
        async with self._database.write() as connection:
            insert = insert_into(connection, TenantRow).values(as_row(tenant))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['tenant_id']))
            return await fetch_one(connection, query, Tenant) or tenant

    async def get(self, tenant_id: str) -> Tenant | None:
        """Return the tenant, or None."""
        query = select_values(TenantRow, Tenant).where(TenantRow.tenant_id == tenant_id)
        async with self._database.read() as connection:
            return await fetch_one(connection, query, Tenant)

    async def list_newest(self, page: Page) -> Sequence[Tenant]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(TenantRow, Tenant)
        query = newest_first(query, page, time=TenantRow.create_time, item_id=TenantRow.tenant_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, Tenant)
