"""Database connections and transactions, on SQLite or PostgreSQL.

The SQLite driver runs statements in a thread. If a caller were cancelled during a statement, the connection could stay
open with an unfinished transaction, which would block all writers until the connection is garbage-collected. A
`ShieldedConnection` therefore finishes each statement.
"""

import asyncio
import re
import sqlite3
import time
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, closing, nullcontext
from pathlib import Path
from typing import Any, Self, TypeVar, cast

import structlog
from sqlalchemy import Connection, event, make_url, text
from sqlalchemy.engine import URL
from sqlalchemy.exc import DBAPIError, InterfaceError, OperationalError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine

from twinkle_services.gateway.errors import StoredRowDamaged
from twinkle_services.gateway.store.migrations import is_current, upgrade_schema
from twinkle_services.kit import sqlite_seals
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable
from twinkle_services.kit.sqlite_seals import COUNT_COMMIT, DatabaseConnection, DatabaseMark
from twinkle_services.kit.worker import completed

Result = TypeVar('Result')
_BUSY_SECONDS = 30
"""Maximum time that a writer waits for another transaction."""
_RETRY_SECONDS = 0.02
"""Pause before retrying an operation that SQLite refuses immediately, without waiting for a lock."""
_MIGRATION_LOCK = 0x7477696E6B6C65
"""Number of the PostgreSQL advisory lock under which one gateway at a time changes the schema."""
KEEPALIVE_OPTIONS: Mapping[str, Any] = {
    'connect_timeout': 10,
    'keepalives': 1,
    'keepalives_idle': 10,
    'keepalives_interval': 5,
    'keepalives_count': 3,
    'tcp_user_timeout': 20_000,
}
"""PostgreSQL connection options that detect a lost server within 30 seconds, even during a statement."""
_READ_ONLY = '25006'
"""SQLSTATE of a write in a read-only transaction."""
_NOT_UTF8 = re.compile("Could not decode to UTF-8 column '([^']*)'")
"""Pattern of the driver's error about a text that is not UTF-8. The error has no code of SQLite."""
_log = structlog.get_logger('database')


class ShieldedConnection(AsyncConnection):
    """Delays a cancellation until the current statement has finished."""

    async def start(self, is_ctxmanager: bool = False) -> 'ShieldedConnection':  # noqa: FBT001, FBT002 (overrides)
        try:
            await completed(super().start(is_ctxmanager))
        except asyncio.CancelledError:
            # The cancelled caller never receives the connection, so nothing else would close it.
            if self.sync_connection is not None:
                await self.close()
            raise
        return self

    async def execute(self, *arguments: Any, **options: Any) -> Any:
        return await completed(super().execute(*arguments, **options))

    async def run_sync(self, work: Callable[..., Result], *arguments: Any, **options: Any) -> Result:
        return await completed(super().run_sync(work, *arguments, **options))

    async def commit(self) -> None:
        await completed(super().commit())

    async def close(self) -> None:
        await completed(super().close())


class Database:
    """Runs transactions. Committed transactions survive a crash of the process and a loss of power.

    Concurrency: safe for any number of tasks. On one SQLite file, the writers of all processes run one at a time.
    """

    def __init__(self, engine: AsyncEngine) -> None:
        self._engine = engine
        event.listen(engine.sync_engine, 'before_cursor_execute', _refuse_nul)
        # SQLite allows one writer, and waiting writers poll with growing pauses: a lock in this process is fairer.
        is_single = engine.dialect.name == 'sqlite'
        self._writer_lock: AbstractAsyncContextManager[Any] = asyncio.Lock() if is_single else nullcontext()
        self._mark = DatabaseMark(Path(str(engine.url.database))) if is_single else None
        self._connection_class = ShieldedConnection if is_single else AsyncConnection

    @classmethod
    async def open(cls, url: str, *, is_loss_accepted: bool = False) -> Self:
        """Open the database at `url` and upgrade its schema.

        Args:
            url: 'sqlite:///<path>' or 'postgresql://<user>:<password>@<host>/<name>'.
            is_loss_accepted: whether to open an SQLite database that lost committed transactions or has damaged rows.

        Raises:
            ValueError: the URL has an unsupported scheme, or is an SQLite URL without a file.
            SchemaNotSupported: the schema has a revision that this release cannot upgrade.
            ServiceUnreachable: the database does not respond.
            DatabaseDamaged: the SQLite database is damaged, or lost committed transactions.
        """
        address = _with_driver(url)
        if address.get_backend_name() == 'sqlite':
            engine = sqlite_engine(address)
            with _converted_connection_errors(), sqlite_seals.named_damage(str(address.database), wrapper=DBAPIError):
                await asyncio.to_thread(_use_wal, str(address.database))
        else:
            engine = create_async_engine(
                address, pool_pre_ping=True, hide_parameters=True, connect_args=dict(KEEPALIVE_OPTIONS)
            )
        database = cls(engine)
        try:
            with sqlite_seals.named_damage(str(address.database), wrapper=DBAPIError):
                async with database.write() as connection:
                    # Statements that fail because of a damaged definition must not count as an unreachable database.
                    with sqlite_seals.named_damage(str(address.database), wrapper=DBAPIError):
                        await connection.run_sync(_migrate, mark=database._mark, is_loss_accepted=is_loss_accepted)
        except BaseException:
            await database.close()
            raise
        return database

    @property
    def dialect(self) -> str:
        """SQL dialect: 'sqlite' or 'postgresql'."""
        return self._engine.dialect.name

    @asynccontextmanager
    async def write(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that commits at the end of the block.

        Raises:
            ServiceUnreachable: the database does not respond.
            StoredRowDamaged: a row of an SQLite database is damaged.
        """
        with _converted_connection_errors():
            async with self._writer_lock, self._connected() as connection:
                # The transaction is begun explicitly, because Alembic would otherwise open its own transactions.
                await connection.run_sync(Connection.begin)
                yield connection
                await self._commit(connection)

    async def _commit(self, connection: AsyncConnection) -> None:
        if self._mark is None:
            await connection.commit()
            return
        count = await connection.scalar(text(COUNT_COMMIT))
        await connection.commit()
        # Another gateway on this file may have written a higher number. A number that is too low is harmless.
        self._mark.write(count)

    @asynccontextmanager
    async def read(self) -> AsyncIterator[AsyncConnection]:
        """Open a transaction that only reads.

        On SQLite, all statements see one consistent state. On PostgreSQL, each statement sees the state at its start.

        Raises:
            ServiceUnreachable: the database does not respond.
            StoredRowDamaged: a row of an SQLite database is damaged.
        """
        with _converted_connection_errors():
            async with self._connected() as connection:
                yield await connection.execution_options(is_read_only=True)

    @asynccontextmanager
    async def _connected(self) -> AsyncIterator[AsyncConnection]:
        """Provide a connection for the duration of the block; uncommitted changes are rolled back at its end."""
        connection = self._connection_class(self._engine)
        await connection.start()
        try:
            yield connection
        finally:
            await connection.close()

    async def close(self) -> None:
        """Close all connections."""
        await self._engine.dispose()
        if self._mark is not None:
            self._mark.close()


class _converted_connection_errors:  # noqa: N801 (used like a function)
    """Converts connection errors to `ServiceUnreachable`, and errors about damaged rows to `StoredRowDamaged`."""

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        damaged = _NOT_UTF8.match(str(getattr(error, 'orig', error)))
        if damaged is not None:
            # The driver's error contains the text, which may be confidential.
            _log.error('stored row damaged', column=damaged[1])
            raise StoredRowDamaged(damaged[1]) from error
        unreachable_errors = OperationalError | InterfaceError | PoolTimeoutError | sqlite3.OperationalError
        if isinstance(error, unreachable_errors) or _is_read_only(error):
            _log.warning('database unreachable', exc_info=error)
            raise ServiceUnreachable('database') from error


def _is_read_only(error: BaseException | None) -> bool:
    """Return whether a write was refused as read-only, for example because a PostgreSQL server became a replica."""
    return isinstance(error, DBAPIError) and getattr(error.orig, 'sqlstate', None) == _READ_ONLY


def _refuse_nul(
    connection: Connection,
    cursor: Any,
    statement: str,
    parameters: Any,
    context: Any,
    executemany: bool,  # noqa: FBT001 (SQLAlchemy's signature)
) -> None:
    """Refuse NUL characters, which PostgreSQL cannot store, on every database.

    Raises:
        InvalidField: a text has a NUL character.
    """
    rows = cast(Sequence[Any], parameters if executemany else (parameters,))
    for row in rows:
        values = cast(Iterable[Any], row.values() if isinstance(row, dict) else row)
        if any(isinstance(value, str) and '\0' in value for value in values):
            raise InvalidField('request', 'must not have a NUL character in a stored string')


def _with_driver(url: str) -> URL:
    address = make_url(url)
    drivers = {'sqlite': 'sqlite+aiosqlite', 'postgresql': 'postgresql+psycopg'}
    if address.get_backend_name() not in drivers:
        raise ValueError(f'database_url: must begin with {" or ".join(drivers)}, got {address.drivername}')
    return address.set(drivername=drivers[address.get_backend_name()])


def sqlite_engine(address: URL) -> AsyncEngine:
    """Return an engine for a SQLite file, without checking the file or its schema."""
    if not address.database or address.database == ':memory:':
        raise ValueError('database_url: name a file, such as sqlite:///twinkle.db')
    Path(address.database).parent.mkdir(parents=True, exist_ok=True)
    engine = create_async_engine(address, connect_args={'timeout': _BUSY_SECONDS}, hide_parameters=True)
    event.listen(engine.sync_engine, 'connect', _prepare_sqlite)
    event.listen(engine.sync_engine, 'begin', _begin_sqlite)
    return engine


def _use_wal(path: str) -> None:
    """Switch the file to write-ahead logging, so that readers do not wait for the writer. The file keeps this setting.

    The switch needs exclusive access, for which SQLite does not wait. Gateways that start together on a new file retry.
    """
    give_up_at = time.monotonic() + _BUSY_SECONDS
    with closing(sqlite3.connect(path, timeout=_BUSY_SECONDS)) as connection:
        while True:
            try:
                connection.execute('PRAGMA journal_mode=WAL')
            except sqlite3.OperationalError as error:
                if error.sqlite_errorcode != sqlite3.SQLITE_BUSY or time.monotonic() > give_up_at:
                    raise
                time.sleep(_RETRY_SECONDS)
            else:
                return


def _prepare_sqlite(connection: Any, record: object) -> None:
    # Disables the driver's implicit transactions, which begin too late and never around DDL.
    connection.isolation_level = None
    with closing(connection.cursor()) as cursor:
        for setting in ('synchronous=FULL', 'foreign_keys=ON', 'cache_size=-2000'):
            cursor.execute(f'PRAGMA {setting}')
    sqlite_seals.prepare(connection)


def _begin_sqlite(connection: Connection) -> None:
    # A writer takes its lock at the start, because upgrading a read lock later can fail.
    options = cast(dict[str, Any], connection.get_execution_options())
    connection.exec_driver_sql('BEGIN' if options.get('is_read_only') else 'BEGIN IMMEDIATE')


def _migrate(connection: Connection, *, mark: DatabaseMark | None, is_loss_accepted: bool) -> None:
    """Check the database and upgrade its schema.

    Raises:
        DatabaseDamaged: the SQLite database is damaged, or lost committed transactions.
        SchemaNotSupported: the schema has a revision that this release cannot upgrade.
    """
    if mark is None:
        connection.execute(text('SELECT pg_advisory_xact_lock(:number)'), {'number': _MIGRATION_LOCK})
        upgrade_schema(connection)
        return
    raw, path = cast(DatabaseConnection, connection.connection), Path(str(connection.engine.url.database))
    rows = sqlite_seals.check(raw, mark, path, is_loss_accepted=is_loss_accepted)
    if rows and not is_loss_accepted:
        sqlite_seals.refuse(rows, path)
    if rows or not is_current(connection):
        sqlite_seals.remove(raw)
        upgrade_schema(connection)
    sqlite_seals.install(raw)
