"""The database of a journal: its tables, and opening it."""

import fcntl
import os
import sqlite3
from pathlib import Path

SCHEMA_VERSION = 2
_USED_IDS = """
CREATE TABLE used_ids (          -- of every adapter there ever was
    adapter_id TEXT PRIMARY KEY,
    tenant_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL
) WITHOUT ROWID;
"""
_TABLES = """
CREATE TABLE meta (name TEXT PRIMARY KEY, value TEXT NOT NULL) WITHOUT ROWID;
CREATE TABLE adapters (
    key INTEGER PRIMARY KEY,
    adapter_id TEXT NOT NULL UNIQUE,
    number INTEGER NOT NULL,     -- the operation that `record` is after
    record BLOB NOT NULL,
    origin BLOB NOT NULL,
    is_fresh INTEGER NOT NULL    -- whether a restore can begin from `origin`
);
CREATE TABLE creations (
    position INTEGER PRIMARY KEY,
    tenant_id TEXT NOT NULL,
    request_id TEXT NOT NULL,
    fingerprint TEXT NOT NULL,
    adapter_id TEXT NOT NULL,
    UNIQUE (tenant_id, request_id)
);
CREATE TABLE operations (
    adapter INTEGER NOT NULL REFERENCES adapters ON DELETE CASCADE,
    number INTEGER NOT NULL,
    kind INTEGER NOT NULL,       -- see kinds.py
    fingerprint TEXT NOT NULL,
    payload BLOB,                -- where it is small
    digest TEXT,                 -- of the file, where it is large
    outcome BLOB,                -- NULL until it is noted
    PRIMARY KEY (adapter, number)
);
CREATE INDEX operations_by_digest ON operations (digest) WHERE digest IS NOT NULL;
CREATE INDEX operations_unsettled ON operations (adapter) WHERE outcome IS NULL;
CREATE TABLE steps (
    adapter INTEGER NOT NULL REFERENCES adapters ON DELETE CASCADE,
    number INTEGER NOT NULL,
    PRIMARY KEY (adapter, number)
) WITHOUT ROWID;
CREATE TABLE snapshots (
    adapter INTEGER NOT NULL REFERENCES adapters ON DELETE CASCADE,
    number INTEGER NOT NULL,
    file TEXT NOT NULL,
    digest TEXT NOT NULL,
    record BLOB NOT NULL,
    PRIMARY KEY (adapter, number)
) WITHOUT ROWID;
"""
_UPGRADES = {
    1: _USED_IDS  # noqa: S608 - constants of this module
    + 'INSERT INTO used_ids SELECT adapter_id, tenant_id, request_id, fingerprint FROM creations;'
}
"""What makes each older version the next one. The ids it has forgotten were drawn by the service: nobody meets them."""


class JournalRefused(Exception):
    """The journal's folder cannot be used; the message says why, and what would help."""


class FolderLock:
    """Keeps a second service from a journal. The system lets go of it when the process ends, however it ends."""

    def __init__(self, path: Path) -> None:
        """Take the lock.

        Raises:
            JournalRefused: another process has it.
        """
        self._file = path.open('a+')
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            self._file.close()
            raise JournalRefused(
                f'the journal in {path.parent} is in use by another process; one model service has one state folder'
            ) from error
        self._file.truncate(0)
        self._file.write(f'{os.getpid()}\n')
        self._file.flush()

    def release(self) -> None:
        """Let go of it."""
        self._file.close()


def open_database(path: Path, *, engine: str, is_creation_allowed: bool = True) -> sqlite3.Connection:
    """Open a journal's database for writing, making it if need be.

    Args:
        path: the file.
        engine: what replay depends on, such as base model and dtype; a journal that holds adapters of another
            is refused.
        is_creation_allowed: False where there are files that an empty database would know nothing of.

    Raises:
        JournalRefused: it is none of ours, of another version or engine, or lost.
    """
    try:
        connection = sqlite3.connect(path, isolation_level=None, check_same_thread=False)
    except sqlite3.Error as error:
        raise JournalRefused(f'{path} cannot be opened: {error}') from error
    try:
        # FULL syncs the write-ahead log at each commit: what is answered is on the disk.
        for pragma in ('journal_mode=WAL', 'synchronous=FULL', 'foreign_keys=ON', 'busy_timeout=0'):
            connection.execute(f'PRAGMA {pragma}')
        if not connection.execute('SELECT count(*) FROM sqlite_master').fetchone()[0]:
            if not is_creation_allowed:
                # A new one would sweep them.
                raise JournalRefused(
                    f'{path} is missing or empty, and files of its adapters are still there; put it back, or move the'
                    ' folder away to begin anew'
                )
            connection.executescript(
                f'BEGIN IMMEDIATE; {_TABLES} {_USED_IDS} PRAGMA user_version={SCHEMA_VERSION}; COMMIT;'
            )
        _upgrade(connection)
        _check_version(connection, path)
        _check_engine(connection, path, engine)
    except sqlite3.DatabaseError as error:
        connection.close()
        raise JournalRefused(f'{path} cannot be opened: {error}') from error
    except JournalRefused:
        connection.close()
        raise
    return connection


def open_to_read(path: Path) -> sqlite3.Connection:
    """Open a journal's database for reading alone; an older version is read as it is.

    Raises:
        JournalRefused: it is none of ours, or of another version.
    """
    try:
        connection = sqlite3.connect(f'file:{path}?mode=ro', uri=True, isolation_level=None, check_same_thread=False)
        if _version_of(connection) not in _UPGRADES:
            _check_version(connection, path)
    except sqlite3.DatabaseError as error:
        raise JournalRefused(f'{path} cannot be read: {error}') from error
    return connection


def _upgrade(connection: sqlite3.Connection) -> None:
    """Bring a database of an older version to this one, step by step, each of them whole or not at all."""
    while (version := _version_of(connection)) in _UPGRADES:
        connection.executescript(f'BEGIN IMMEDIATE; {_UPGRADES[version]} PRAGMA user_version={version + 1}; COMMIT;')


def _version_of(connection: sqlite3.Connection) -> int:
    return connection.execute('PRAGMA user_version').fetchone()[0]


def _check_version(connection: sqlite3.Connection, path: Path) -> None:
    version = _version_of(connection)
    if version != SCHEMA_VERSION:
        raise JournalRefused(f'{path} is of version {version}; this service reads version {SCHEMA_VERSION}')


def _check_engine(connection: sqlite3.Connection, path: Path, engine: str) -> None:
    row = connection.execute("SELECT value FROM meta WHERE name = 'engine'").fetchone()
    is_empty = not connection.execute('SELECT 1 FROM adapters LIMIT 1').fetchone()
    if row is not None and row[0] != engine and not is_empty:
        raise JournalRefused(f'{path} holds adapters of {row[0]}, not of {engine}; use another state folder')
    connection.execute("INSERT OR REPLACE INTO meta VALUES ('engine', ?)", (engine,))
