"""A database: its connections, its transactions, its schema."""

import asyncio
import sqlite3
import time
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Any, Self, cast

import structlog
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from services.gateway.store.migrations import upgrade_schema
from services.gateway.store.uncut_connection import UncutConnection
from services.kit.errors import InvalidField, ServiceUnreachable

_BUSY_SECONDS = 30
"""How long a writer waits for another one's transaction."""
_LOOK_SECONDS = 0.02
"""Between two tries where SQLite itself does not wait."""
_MIGRATION_LOCK = 0x7477696E6B6C65
"""Number of PostgreSQL's advisory lock: only one gateway changes the schema at a time."""

KEPT_ALIVE: Mapping[str, Any] = {
    'connect_timeout': 10,
    'keepalives': 1,
    'keepalives_idle': 10,
    'keepalives_interval': 5,
    'keepalives_count': 3,
    'tcp_user_timeout': 20_000,
}
"""Of a connection to PostgreSQL: that its machine is gone is noticed within half a minute, also amid a statement."""
_READ_ONLY = '25006'
"""PostgreSQL's state for a write where nothing may be written."""

_log = structlog.get_logger('database')


class Database:
    """Runs transactions. One that commits is kept across a kill of the process.

    Concurrency: any number of tasks; of several processes on one SQLite file, writers take turns.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        """Use `engine`; see `open`."""
        self._engine = engine
        event.listen(engine.sync_engine, 'before_cursor_execute', _refuse_nul)
        # SQLite has one writer at a time, and those that wait for it look again in ever longer intervals.
        is_single = engine.dialect.name == 'sqlite'
        self._turn: AbstractAsyncContextManager[Any] = asyncio.Lock() if is_single else nullcontext()
        self._connection_class = UncutConnection if is_single else AsyncConnection

    @classmethod
    async def open(cls, url: str) -> Self:
        """Return the database at `url` with its schema brought up to date.

        Args:
            url: 'sqlite:///<path>' or 'postgresql://<user>:<password>@<host>/<name>'.

        Raises:
            ValueError: the URL is of another kind.
            ServiceUnreachable: the database does not answer.
        """
        address = _with_driver(url)
        if address.get_backend_name() == 'sqlite':
            engine = _sqlite_engine(address)
            with _connection_errors_as_facts():
                await asyncio.to_thread(_use_wal, str(address.database))
        else:
            engine = create_async_engine(
                address, pool_pre_ping=True, hide_parameters=True, connect_args=dict(KEPT_ALIVE)
            )
        database = cls(engine)
        try:
            async with database.write() as connection:
                await connection.run_sync(_migrate)
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def dialect(self) -> str:
        """Which SQL it speaks: 'sqlite' or 'postgresql'."""
        return self._engine.dialect.name

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that commits at the end of the block.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        with _connection_errors_as_facts():
            async with self._turn, self._connected() as connection:
                # At once and for the whole block: what changes the schema would make transactions of its own.
                await connection.run_sync(_begin)
                yield connection
                await connection.commit()

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that sees one state and changes nothing.

        Raises:
            ServiceUnreachable: the database does not answer.
        """
        with _connection_errors_as_facts():
            async with self._connected() as connection:
                yield await connection.execution_options(is_read_only=True)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """Connect for the block; what was begun at its end and is not committed is undone."""
        connection = self._connection_class(self._engine)
        await connection.start()
        try:
            yield connection
        finally:
            await connection.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()


class _connection_errors_as_facts:  # noqa: N801 (used as a block, named like one)
    """Turns a database that does not answer into a fact a caller may see."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        absent = OperationalError | InterfaceError | PoolTimeoutError | sqlite3.OperationalError
        if isinstance(error, absent) or _is_read_only(error):
            _log.warning('the database does not answer', exc_info=error)
            raise ServiceUnreachable('database') from error


def _is_read_only(error: BaseException | None) -> bool:
    """Say whether it was written where nothing may be: at a server that another one has taken over from."""
    return isinstance(error, DBAPIError) and getattr(error.orig, 'sqlstate', None) == _READ_ONLY


def _refuse_nul(
    connection: Connection,
    cursor: Any,
    statement: str,
    parameters: Any,
    context: Any,
    executemany: bool,  # noqa: FBT001 (the library's own signature)
) -> None:
    """Refuse texts that PostgreSQL could not keep, whichever database it is: nothing that is kept has one.

    Raises:
        InvalidField: a text has a NUL character.
    """
    del connection, cursor, statement, context
    rows = cast(Sequence[Any], parameters if executemany else (parameters,))
    for row in rows:
        values = cast(Iterable[Any], row.values() if isinstance(row, dict) else row)
        if any(isinstance(value, str) and '\0' in value for value in values):
            raise InvalidField('request', 'has a NUL character in a text that is kept')


def _with_driver(url: str) -> URL:
    address = make_url(url)
    drivers = {'sqlite': 'sqlite+aiosqlite', 'postgresql': 'postgresql+psycopg'}
    if address.get_backend_name() not in drivers:
        raise ValueError(f'database_url: must begin with {" or ".join(drivers)}, got {address.drivername}')
    return address.set(drivername=drivers[address.get_backend_name()])


def _sqlite_engine(address: URL) -> AsyncEngine:
    if not address.database or address.database == ':memory:':
        raise ValueError('database_url: name a file, such as sqlite:///twinkle.db')
    Path(address.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(address, connect_args={'timeout': _BUSY_SECONDS}, hide_parameters=True)
    event.listen(engine.sync_engine, 'connect', _prepare_sqlite)
    event.listen(engine.sync_engine, 'begin', _begin_sqlite)
    return engine


def _use_wal(path: str) -> None:
    """Have a file's readers not wait for its writer, which is kept in the file.

    Whoever changes it needs the file alone, and SQLite does not wait for that: gateways may begin at once on a new one.
    """
    give_up_at = time.monotonic() + _BUSY_SECONDS
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        while True:
            try:
                connection.execute('PRAGMA journal_mode=WAL')
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                    raise
                time.sleep(_LOOK_SECONDS)
            else:
                return


def _prepare_sqlite(connection: Any, record: object) -> None:
    del record
    # Without this the driver begins transactions by itself, too late and never around DDL.
    connection.isolation_level = None
    cursor = connection.cursor()
    for setting in ('synchronous=NORMAL', 'foreign_keys=ON', 'cache_size=-2000'):
        cursor.execute(f'PRAGMA {setting}')
    cursor.close()


def _begin(connection: Connection) -> None:
    connection.begin()


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock at once: a reader that turns writer later may find that it cannot.
    options = cast(dict[str, Any], connection.get_execution_options())
    connection.exec_driver_sql('BEGIN' if options.get('is_read_only') else 'BEGIN IMMEDIATE')


def _migrate(connection: Connection) -> None:
    if connection.dialect.name == 'postgresql':
        connection.execute(text('SELECT pg_advisory_xact_lock(:number)'), {'number': _MIGRATION_LOCK})
    upgrade_schema(connection)
