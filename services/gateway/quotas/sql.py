"""Quotas in SQL."""

from collections.abc import Sequence
from dataclasses import fields

from sqlalchemy import ForeignKey, String, select
from sqlalchemy.orm import Mapped, mapped_column

from services.gateway.quotas.rules import Quota, TenantQuota
from services.gateway.store.base import Base
from services.gateway.store.database import Database
from services.gateway.store.statements import as_row, insert_into

_LIMITS = [field.name for field in fields(Quota)]


class QuotaRow(Base):
    """Quotas that administrators set; NULL selects the configured default."""

    __tablename__ = 'quotas'
    tenant_id: Mapped[str] = mapped_column(String(64), ForeignKey('tenants.tenant_id'), primary_key=True)
    max_adapters: Mapped[int | None]
    tokens_per_second: Mapped[int | None]
    burst_tokens: Mapped[int | None]
    concurrent_samples: Mapped[int | None]
    stored_bytes: Mapped[int | None]
    weight: Mapped[float | None]


class SqlQuotaStore:
    """Keeps what was set for tenants."""

    def __init__(self, database: Database) -> None:
        """Keep it in `database`."""
        self._database = database

    async def list_all(self) -> Sequence[TenantQuota]:
        """Return all."""
        query = select(QuotaRow.tenant_id, *(getattr(QuotaRow, name) for name in _LIMITS)).order_by(QuotaRow.tenant_id)
        async with self._database.read() as connection:
            rows = (await connection.execute(query)).all()
        return [
            TenantQuota(tenant_id=tenant_id, quota=Quota(**dict(zip(_LIMITS, limits, strict=True))))
            for tenant_id, *limits in rows
        ]

    async def put(self, quota: TenantQuota) -> None:
        """Keep a quota in the place of the tenant's last one."""
        row = {'tenant_id': quota.tenant_id, **as_row(quota.quota)}
        async with self._database.write() as connection:
            insert = insert_into(connection, QuotaRow).values(row)
            await connection.execute(insert.on_conflict_do_update(index_elements=['tenant_id'], set_=row))
