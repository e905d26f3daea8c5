"""How far each feed was read, in SQL."""

from sqlalchemy import select

from services.gateway.backends.sql.database import Database
from services.gateway.backends.sql.statements import insert_into
from services.gateway.backends.sql.tables import WatchPositionRow
from services.kit.clock import Clock


class SqlPositionStore:
    """Remembers positions."""

    def __init__(self, database: Database, *, clock: Clock) -> None:
        """Keep them in `database`."""
        self._database = database
        self._clock = clock

    async def load(self, feed: str) -> str:
        """Return the last token saved; empty for none."""
        query = select(WatchPositionRow.resume_token).where(WatchPositionRow.feed == feed)
        async with self._database.read() as connection:
            return (await connection.execute(query)).scalar_one_or_none() or ''

    async def save(self, feed: str, resume_token: str) -> None:
        """Keep the token in place of the last one."""
        row = {'feed': feed, 'resume_token': resume_token, 'update_time': self._clock.now()}
        async with self._database.write() as connection:
            insert = insert_into(connection, WatchPositionRow).values(row)
            await connection.execute(insert.on_conflict_do_update(index_elements=['feed'], set_=row))
