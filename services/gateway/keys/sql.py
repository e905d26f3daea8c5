"""API keys in SQL. Of a secret only its digest is ever here."""

import hmac
from collections.abc import Callable, Sequence
from datetime import datetime

from sqlalchemy import select, update

from services.gateway.keys.api_key import ApiKey, Succession
from services.gateway.keys.tables import ApiKeyRow
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


class SqlKeyStore:
    """Keeps API keys."""

    def __init__(self, database: Database) -> None:
        """Keep them in `database`."""
        self._database = database

    async def add(self, key: ApiKey, *, digest: bytes) -> None:
        """Keep the key; one with that digest already stays as it is."""
        async with self._database.write() as connection:
            insert = insert_into(connection, ApiKeyRow).values(digest=digest, **as_row(key))
            await connection.execute(insert.on_conflict_do_nothing(index_elements=['digest']))

    async def find(self, digest: bytes) -> ApiKey | None:
        """Return the key with this digest, good or not, or None."""
        columns = select(ApiKeyRow.digest, ApiKeyRow.key_id).where(ApiKeyRow.digest == digest)
        async with self._database.read() as connection:
            row = (await connection.execute(columns)).one_or_none()
            # The index already found it; this comparison takes the same time wherever two digests differ.
            if row is None or not hmac.compare_digest(row.digest, digest):
                return None
            query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.key_id == row.key_id)
            return await fetch_one(connection, query, ApiKey)

    async def replace(
        self, key_id: str, succeed: Callable[[ApiKey], Succession], *, digest: bytes
    ) -> Succession | None:
        """Keep both keys of `succeed(key)` in one transaction, the heir by `digest`; None if there is no such key.

        Raises:
            DomainError: whatever `succeed` raised; nothing is changed then.
        """
        is_it = ApiKeyRow.key_id == key_id
        async with self._database.write() as connection:
            key = await fetch_one(connection, select_values(ApiKeyRow, ApiKey).where(is_it).with_for_update(), ApiKey)
            if key is None:
                return None
            succession = succeed(key)
            await connection.execute(update(ApiKeyRow).where(is_it).values(as_row(succession.retired)))
            await connection.execute(
                insert_into(connection, ApiKeyRow).values(digest=digest, **as_row(succession.heir))
            )
            return succession

    async def revoke(self, key_id: str, *, moment: datetime) -> ApiKey | None:
        """Mark the key revoked, at `moment` unless it was before, and return it; None if there is none."""
        is_good = (ApiKeyRow.key_id == key_id) & ApiKeyRow.revoke_time.is_(None)
        query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.key_id == key_id)
        async with self._database.write() as connection:
            await connection.execute(update(ApiKeyRow).where(is_good).values(revoke_time=moment))
            return await fetch_one(connection, query, ApiKey)

    async def list_newest(self, tenant_id: str, page: Page) -> Sequence[ApiKey]:
        """Return one item more than the page where there are as many, newest first."""
        query = select_values(ApiKeyRow, ApiKey).where(ApiKeyRow.tenant_id == tenant_id)
        query = newest_first(query, page, time=ApiKeyRow.create_time, item_id=ApiKeyRow.key_id)
        async with self._database.read() as connection:
            return await fetch_all(connection, query, ApiKey)
