"""Detects damage to a SQLite database that SQLite itself does not detect: changed values, and lost transactions.

SQLite returns a changed value as if it had been stored, and silently drops all transactions after a damaged frame of
its write-ahead log. Therefore triggers store a digest of each row, its seal, in the table `row_seals`. The table also
contains the number of transactions, which is copied to a small file, the mark. A database whose count is below its mark
has lost transactions.

The mark is written after each commit, before the commit is acknowledged, but synced only occasionally. If the process
is killed, the mark shows every loss. After a power failure, it shows the losses of transactions before its last sync.
The mark is never ahead of the database.
"""

import os
import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, Protocol, cast

import structlog
from blake3 import blake3

_log = structlog.get_logger('database')

_SEALS = 'row_seals'
_SCHEMA = 'sqlite_schema'
"""Name under which the definitions of the tables are sealed."""
_CREATE = f"""CREATE TABLE IF NOT EXISTS {_SEALS} (
    name TEXT NOT NULL, key TEXT NOT NULL, seal BLOB NOT NULL, PRIMARY KEY (name, key)
) WITHOUT ROWID"""
_COUNTER = f"INSERT OR IGNORE INTO {_SEALS} VALUES ('', 'transactions', 0)"  # noqa: S608 - constants
_MISTYPED = """SELECT quote(name) FROM sqlite_master WHERE typeof(type) || typeof(name) || typeof(tbl_name) <>
    'texttexttext' OR typeof(sql) NOT IN ('text', 'null')"""
"""Definitions with bytes instead of strings, which SQLite accepts, but which comparisons with strings do not find."""
_TRIGGERS = "SELECT name FROM sqlite_master WHERE type = 'trigger' AND name LIKE 'seal\\_%' ESCAPE '\\'"
COUNT_COMMIT = f"UPDATE {_SEALS} SET seal = seal + 1 WHERE name = '' RETURNING seal"  # noqa: S608 - constants
"""Statement that counts a transaction; run it once in each transaction, and write its result to the mark."""
SWITCH = 'accept_data_loss: true'
"""Setting of the services that accepts lost transactions and damaged rows."""
_DAMAGE_CODES = (sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB, sqlite3.SQLITE_ERROR)
_NAMED_ROWS = 5
"""Number of damaged rows that a message names."""


class DatabaseConnection(Protocol):
    """A DB-API connection to SQLite, such as `sqlite3.Connection`."""

    def cursor(self) -> Any:
        """Return a new cursor."""
        ...

    def create_function(self, *arguments: Any, **options: Any) -> Any:
        """Register a function that statements may call."""
        ...


class DatabaseDamaged(Exception):
    """The database is damaged or lost transactions; the message names the file, the cause and the remedy."""


@dataclass(frozen=True)
class DamagedRow:
    """A row that differs from the committed one, or was added or removed without its seal."""

    table: str
    key: str
    """Values of the primary key as SQL literals, separated by commas."""


class DatabaseMark:
    """The file with the number of committed transactions. Concurrency: one writer at a time."""

    def __init__(self, database: Path) -> None:
        self.path = database.with_name(f'{database.name}-mark')
        self._descriptor: int | None = None

    def read(self) -> int:
        """Return the number of committed transactions; 0 if the file is missing, unreadable or damaged."""
        try:
            content = self.path.read_bytes()
        except OSError:
            return 0
        digits = content[:20]
        if content != _mark_of(digits) or not digits.isdigit():
            _log.warning('mark of the database damaged; lost transactions cannot be detected', path=str(self.path))
            return 0
        return int(digits)

    def write(self, count: int) -> None:
        """Store the number of committed transactions; a failure of the disk is logged."""
        try:
            if self._descriptor is None:
                self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o600)
            os.pwrite(self._descriptor, _mark_of(b'%020d' % count), 0)
        except OSError as error:
            _log.warning('mark of the database not written', path=str(self.path), error=str(error))

    def sync(self) -> None:
        """Make the stored number durable."""
        if self._descriptor is not None:
            with suppress(OSError):
                os.fsync(self._descriptor)

    def close(self) -> None:
        """Make the stored number durable, and close the file."""
        self.sync()
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _mark_of(digits: bytes) -> bytes:
    return digits + b' ' + blake3(digits).hexdigest(length=8).encode() + b'\n'


def prepare(connection: DatabaseConnection) -> None:
    """Prepare a new connection for writing to a sealed database."""
    connection.create_function('row_seal', -1, _row_seal, deterministic=True)
    # Without this setting, a REPLACE deletes rows without running the triggers that remove seals.
    _run(connection, 'PRAGMA recursive_triggers=ON')


def install(connection: DatabaseConnection) -> None:
    """Seal all rows and create the triggers, unless both exist. Run this within a transaction.

    The counter of transactions is restored if it is missing, because its loss was accepted.
    """
    is_sealed = _is_sealed(connection)
    _run(connection, _CREATE)
    _run(connection, _COUNTER)
    if is_sealed and _run(connection, _TRIGGERS):
        return
    remove(connection)
    for table in _tables(connection):
        for statement in _triggers(connection, table):
            _run(connection, statement)
    _run(connection, f"DELETE FROM {_SEALS} WHERE name <> ''")  # noqa: S608 - constants
    seal_again(connection, [*_tables(connection), _SCHEMA])


def add_table(connection: DatabaseConnection, table: str) -> None:
    """Seal a new, empty table within the transaction that created it; do nothing if the database has no seals."""
    if not _is_sealed(connection):
        return
    for statement in _triggers(connection, table):
        _run(connection, statement)
    key, seal = _expressions(connection, _SCHEMA)
    rows = f"{_rows_of(_SCHEMA)} WHERE tbl_name = '{table}'"
    _run(connection, f"INSERT INTO {_SEALS} SELECT '{_SCHEMA}', {key}, {seal} FROM {rows}")  # noqa: S608 - constants


def seal_again(connection: DatabaseConnection, tables: Iterable[str]) -> None:
    """Seal the current rows of some tables again, even damaged ones; `sqlite_schema` stands for the schema."""
    for table in tables:
        _run(connection, f"DELETE FROM {_SEALS} WHERE name = '{table}'")  # noqa: S608 - names of the schema
        key, seal = _expressions(connection, table)
        _run(connection, f"INSERT INTO {_SEALS} SELECT '{table}', {key}, {seal} FROM {_rows_of(table)}")  # noqa: S608


def forget(connection: DatabaseConnection, tables: Iterable[str], first_key: int) -> None:
    """Remove the seals of existing and deleted rows of `tables` whose primary key begins with the value `first_key`."""
    for table in tables:
        statement = f"DELETE FROM {_SEALS} WHERE name = '{table}' AND (key = '{first_key}' OR key GLOB '{first_key},*')"  # noqa: S608
        _run(connection, statement)


def remove(connection: DatabaseConnection) -> None:
    """Drop the triggers, so that the schema can be changed. Afterwards, `install` seals all rows again."""
    for (name,) in _run(connection, _TRIGGERS):
        _run(connection, f'DROP TRIGGER "{name}"')


def damaged_rows(connection: DatabaseConnection) -> list[DamagedRow]:
    """Return the rows that do not match their seals; an unsealed database has none.

    Raises:
        sqlite3.DatabaseError: The database cannot be read.
    """
    if not _is_sealed(connection):
        return []
    found = list[DamagedRow]()
    for table in [*_tables(connection), _SCHEMA]:
        key, seal = _expressions(connection, table)
        rows = f'(SELECT {key} AS k, {seal} AS s FROM {_rows_of(table)})'  # noqa: S608 - names of the schema
        statement = (
            f"SELECT hex(k) FROM {rows} LEFT JOIN {_SEALS} ON name = '{table}' AND key = k WHERE seal IS NOT s"  # noqa: S608
            f" UNION SELECT hex(key) FROM {_SEALS} WHERE name = '{table}' AND key NOT IN (SELECT k FROM {rows})"
        )
        keys = [bytes.fromhex(key).decode(errors='replace') for (key,) in _run(connection, statement)]
        found += [DamagedRow(table, key) for key in keys]
    mistyped = [DamagedRow(_SCHEMA, key) for (key,) in _run(connection, _MISTYPED)]
    return found + [row for row in mistyped if row not in found]


def check(
    connection: DatabaseConnection, mark: DatabaseMark, path: Path, *, is_loss_accepted: bool
) -> list[DamagedRow]:
    """Check the structure of the database, its transactions and its rows, and return the damaged rows.

    Damaged indexes are rebuilt.

    Raises:
        DatabaseDamaged: The structure is damaged, or committed transactions are missing and the loss is not accepted.
        sqlite3.DatabaseError: The database cannot be read.
    """
    problems = _run(connection, 'PRAGMA integrity_check(1)')
    if problems != [('ok',)]:
        # Indexes can be rebuilt from the rows.
        _log.error('database damaged; rebuilding its indexes', path=str(path), problem=problems[0][0])
        _run(connection, 'REINDEX')
        problems = _run(connection, 'PRAGMA integrity_check(1)')
    if problems != [('ok',)]:
        raise DatabaseDamaged(f'{path} is damaged: {problems[0][0]}; restore it from a backup')
    rows = _run(connection, f"SELECT seal FROM {_SEALS} WHERE name = ''") if _is_sealed(connection) else []  # noqa: S608
    count = rows[0][0] if rows and isinstance(rows[0][0], int) else 0
    missing = mark.read() - count
    if missing > 0 and not is_loss_accepted:
        raise DatabaseDamaged(
            f'{path} lost its last {missing} transactions: {path.name}-wal was damaged or deleted, or {path.name} was'
            f' replaced by an older copy. Acknowledged work that they recorded is missing. Restore both files, or set'
            f' {SWITCH} to start without that work'
        )
    damaged = damaged_rows(connection)
    if damaged or missing > 0:
        _log.error('database damaged', path=str(path), lost=max(missing, 0), rows=describe(damaged))
    return damaged


def refuse(rows: Sequence[DamagedRow], path: Path) -> NoReturn:
    """Refuse a database with damaged rows.

    Raises:
        DatabaseDamaged: Always.
    """
    raise DatabaseDamaged(
        f'{path} is damaged: {describe(rows)} differ from what was written; restore the file from a backup, or set'
        f' {SWITCH} to start with the rows as they are'
    )


@contextmanager
def named_damage(path: str, *, wrapper: type[Exception] = sqlite3.Error) -> Iterator[None]:
    """Convert errors of a damaged database to DatabaseDamaged, which names the file.

    Exceptions of the class `wrapper` contain the error of SQLite as their attribute `orig` and are converted, too.

    Raises:
        DatabaseDamaged: The file is damaged.
    """
    try:
        yield
    except (sqlite3.Error, UnicodeDecodeError, wrapper) as error:
        cause = getattr(error, 'orig', error)
        code = getattr(cause, 'sqlite_errorcode', 0) & 0xFF
        if not isinstance(cause, UnicodeDecodeError) and code not in _DAMAGE_CODES:
            raise
        raise DatabaseDamaged(f'{path} is damaged: {cause}; restore it from a backup') from error


def describe(rows: Sequence[DamagedRow]) -> str:
    """Return a text that names the first damaged rows."""
    named = ', '.join(f'{row.table} {row.key}' for row in rows[:_NAMED_ROWS])
    return named if len(rows) <= _NAMED_ROWS else f'{named} and {len(rows) - _NAMED_ROWS} more'


def _run(connection: DatabaseConnection, statement: str) -> list[tuple[Any, ...]]:
    cursor = connection.cursor()
    try:
        cursor.execute(statement)
        return cast(list[tuple[Any, ...]], cursor.fetchall()) if cursor.description else []
    finally:
        cursor.close()


def _is_sealed(connection: DatabaseConnection) -> bool:
    # A damaged name may consist of bytes.
    return bool(_run(connection, f"SELECT 1 FROM sqlite_master WHERE CAST(name AS TEXT) = '{_SEALS}'"))  # noqa: S608


def _tables(connection: DatabaseConnection) -> list[str]:
    rows = _run(
        connection, "SELECT name FROM sqlite_master WHERE type = 'table' AND name NOT LIKE 'sqlite\\_%' ESCAPE '\\'"
    )
    return [name for (name,) in rows if isinstance(name, str) and name != _SEALS]


def _rows_of(table: str) -> str:
    """Return the SQL source of a table's rows; SQLite's internal tables are omitted from the schema."""
    if table != _SCHEMA:
        return f'"{table}"'
    return "(SELECT * FROM sqlite_master WHERE name NOT LIKE 'sqlite\\_%' ESCAPE '\\')"


def _expressions(connection: DatabaseConnection, table: str, row: str = '') -> tuple[str, str]:
    """Return the expressions of a row's key and of its seal; `row` is 'NEW.' or 'OLD.' in triggers."""
    info = _run(connection, f'PRAGMA table_info("{table}")')
    if table == _SCHEMA:
        # The root pages are not sealed, because they may change.
        return 'quote(name)', 'row_seal(CAST(type AS BLOB), CAST(tbl_name AS BLOB), CAST(sql AS BLOB))'
    columns = [f'{row}"{column[1]}"' for column in info]
    keys = [f'quote({row}"{column[1]}")' for column in sorted(info, key=lambda item: item[5]) if column[5]]
    # Strings are read as bytes, because a damaged string may be invalid UTF-8.
    values = [f"CASE typeof({name}) WHEN 'text' THEN CAST({name} AS BLOB) ELSE {name} END" for name in columns]
    types = "||','||".join(f'typeof({name})' for name in columns)
    return "||','||".join(keys or [f'quote({row}rowid)']), f'row_seal({types}, {", ".join(values)})'


def _triggers(connection: DatabaseConnection, table: str) -> list[str]:
    new_key, new_seal = _expressions(connection, table, 'NEW.')
    old_key, _ = _expressions(connection, table, 'OLD.')
    drop = f"DELETE FROM {_SEALS} WHERE name = '{table}' AND key = {old_key};"  # noqa: S608 - names of the schema
    # The conflict policy of the outer statement applies in triggers, so the seal is deleted first instead of replaced.
    add = (
        f"DELETE FROM {_SEALS} WHERE name = '{table}' AND key = {new_key};"  # noqa: S608
        f" INSERT INTO {_SEALS} VALUES ('{table}', {new_key}, {new_seal});"
    )
    return [
        f'CREATE TRIGGER "seal_insert_{table}" AFTER INSERT ON "{table}" BEGIN {add} END',
        f'CREATE TRIGGER "seal_update_{table}" AFTER UPDATE ON "{table}" BEGIN {drop} {add} END',
        f'CREATE TRIGGER "seal_delete_{table}" AFTER DELETE ON "{table}" BEGIN {drop} END',
    ]


def _row_seal(*values: float | str | bytes | None) -> bytes:
    hasher = blake3()
    for value in values:
        data = value if isinstance(value, bytes) else repr(value).encode()
        hasher.update(len(data).to_bytes(8, 'little'))
        hasher.update(data)
    return hasher.digest(length=8)
