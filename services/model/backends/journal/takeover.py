"""Moves the content of another trainer's journal to this one, exactly once.

The lock of the other journal's folder proves that no process uses it. The move has three durable steps. First, the
other journal names this one as its `taker`, so that no other process can open it. Then one transaction adds all rows
here and records the move. Finally, the other journal deletes its adapters and gets a new id. A move that was
interrupted between two steps continues when it is repeated. The ids of used adapters remain in the other journal, so
that its trainer never uses one of them again.
"""

import asyncio
import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.ids import new_id
from twinkle_services.kit.sqlite_seals import COUNT_COMMIT
from twinkle_services.model.backends.journal.environment import differing_settings
from twinkle_services.model.backends.journal.group_commit import Transaction, Writer
from twinkle_services.model.backends.journal.payloads import Payloads
from twinkle_services.model.backends.journal.schema import (
    DATABASE,
    TAKER,
    FolderLock,
    JournalInUse,
    JournalRefused,
    OpenedDatabase,
    open_folder,
)
from twinkle_services.model.backends.journal.snapshots import SnapshotFiles
from twinkle_services.model.domain.errors import TakeoverRefused
from twinkle_services.model.ports import RecordCodec

_ID, _MOVE = 'journal id', 'move'
_TAKEN, _MOVED = 'taken ', 'moved '
"""Prefixes of the names under which the ids of taken journals and of moves are stored."""
_ROWS = {
    'operations': ('number', 'kind', 'fingerprint', 'payload', 'digest', 'outcome', 'attempts'),
    'steps': ('number',),
    'snapshots': ('number', 'file', 'digest', 'record'),
}
"""Tables with rows of adapters, and their columns except the key of the adapter."""
_REQUESTS = {
    'used_ids': ('adapter_id', 'tenant_id', 'request_id', 'fingerprint'),
    'creations': ('tenant_id', 'request_id', 'fingerprint', 'adapter_id'),
    'expired_adapters': ('adapter_id', 'tenant_id', 'checkpoint_path'),
}
"""Tables whose rows remain after an adapter was deleted, and their columns."""

_ADAPTER_IDS = 'SELECT adapter_id FROM adapters'
_ADAPTERS = 'SELECT key, adapter_id, number, record, origin, is_fresh FROM adapters ORDER BY key'
_AdapterRow = tuple[int, str, int, bytes, bytes, int]


def journal_ids(tx: Transaction) -> tuple[str, ...]:
    """Return the id of the journal, after creating one if necessary, and the ids of the journals that it took over."""
    tx.execute('INSERT OR IGNORE INTO meta VALUES (?, ?)', _ID, new_id('jn'))
    own = tx.execute('SELECT value FROM meta WHERE name = ?', _ID).fetchone()[0]
    taken = tx.execute('SELECT substr(name, length(?1) + 1) FROM meta WHERE substr(name, 1, length(?1)) = ?1', _TAKEN)
    return (own, *(name for (name,) in taken))


@dataclass(frozen=True)
class TargetJournal:
    """The parts of this journal that a takeover changes."""

    folder: Path
    writer: Writer
    payloads: Payloads
    snapshots: SnapshotFiles
    codec: RecordCodec
    moved: set[str]
    """Ids of the moved adapters. A takeover adds them before its last step, so they are known if that step fails."""


class Takeover:
    """Takeover of one ended trainer's journal.

    Args:
        trainer: Name of the trainer, for errors.
        folder: Folder of the trainer's journal.
        into: Parts of this journal.
    """

    def __init__(self, trainer: str, folder: Path, into: TargetJournal) -> None:
        self._trainer = trainer
        self._folder = folder
        self._into = into

    async def run(self, engine: str, ids: Sequence[str]) -> None:
        """Move all adapters that earlier calls have not moved.

        Args:
            engine: Name of this trainer's engine.
            ids: Ids of this journal and of those that it took over.

        Raises:
            TakeoverRefused: The trainer is running, its journal cannot be used, or both journals contain the same
                adapter id; no adapter was moved.
            sqlite3.Error, OSError: A disk failed; the call must be repeated.
        """
        lock, source = await asyncio.to_thread(self._open, engine, ids)
        try:
            known = await self._into.writer.run(_adapter_ids)
            move = await asyncio.to_thread(self._begin, source, ids[0], known)
            digests = list[str]()
            try:
                await asyncio.to_thread(self._copy_files, source, digests)
                moved = await self._into.writer.run(lambda tx: self._insert(tx, source.connection, move))
                self._into.moved.update(moved)
            finally:
                for digest in digests:
                    self._into.payloads.unpin(digest)
            await asyncio.to_thread(self._finish, source)
        finally:
            source.connection.close()
            source.mark.close()
            lock.release()

    def _begin(self, source: OpenedDatabase, taker: str, known: frozenset[str]) -> str:
        """Reserve the other journal for this one, whose adapters are `known`, and return the id of the move.

        Raises:
            TakeoverRefused: Both journals have an adapter with the same id; nothing was changed.
        """
        rows = source.connection
        begun = rows.execute('SELECT value FROM meta WHERE name = ?', (_MOVE,)).fetchone()
        if begun is None and any(adapter_id in known for (adapter_id,) in rows.execute(_ADAPTER_IDS)):
            raise TakeoverRefused(self._trainer, 'both trainers have a run with the same id; delete one of them')
        move = begun[0] if begun is not None else new_id('mv')
        with _committed(source):
            for name, value in ((TAKER, taker), (_MOVE, move)):
                rows.execute('INSERT OR REPLACE INTO meta VALUES (?, ?)', (name, value))
        reach('takeover.begun')
        return move

    def _copy_files(self, source: OpenedDatabase, digests: list[str]) -> None:
        """Add the files of the other journal to this one durably, and append the pinned digests to `digests`."""
        rows = source.connection
        for (name,) in rows.execute('SELECT file FROM snapshots'):
            self._into.snapshots.adopt(self._folder / 'snapshots' / name)
        for (digest,) in rows.execute('SELECT DISTINCT digest FROM operations WHERE digest IS NOT NULL'):
            self._into.payloads.adopt(self._folder / 'payloads' / digest)
            digests.append(digest)
        reach('takeover.copied')

    def _insert(self, tx: Transaction, rows: sqlite3.Connection, move: str) -> frozenset[str]:
        """Add all rows of the other journal, and return the adapter ids; an empty set if an earlier call added them."""
        if tx.execute('SELECT 1 FROM meta WHERE name = ?', _MOVED + move).fetchone():
            return frozenset()
        added = frozenset(self._insert_adapter(tx, rows, row) for row in rows.execute(_ADAPTERS))
        for table, columns in _REQUESTS.items():
            order = 'adapter_id' if table == 'used_ids' else 'position'
            for row in rows.execute(f'SELECT {", ".join(columns)} FROM {table} ORDER BY {order}'):  # noqa: S608 - constants
                tx.execute(_insertion(table, columns), *row)
        own = rows.execute('SELECT value FROM meta WHERE name = ?', (_ID,)).fetchall()
        facts = [name for (name,) in rows.execute('SELECT name FROM meta') if name.startswith((_TAKEN, _MOVED))]
        for name in (*facts, *(_TAKEN + value for (value,) in own), _MOVED + move):
            tx.execute("INSERT OR REPLACE INTO meta VALUES (?, '')", name)
        return added

    def _finish(self, source: OpenedDatabase) -> None:
        """Delete the adapters of the other journal, so that its trainer can use the journal again."""
        reach('takeover.inserted')
        rows = source.connection
        facts = [name for (name,) in rows.execute('SELECT name FROM meta') if name.startswith((_TAKEN, _MOVED))]
        with _committed(source):
            rows.execute('DELETE FROM adapters')
            rows.execute("DELETE FROM meta WHERE name LIKE '% of %'")
            rows.executemany('DELETE FROM meta WHERE name = ?', [(name,) for name in (*facts, TAKER, _MOVE)])
            rows.execute('INSERT OR REPLACE INTO meta VALUES (?, ?)', (_ID, new_id('jn')))
        reach('takeover.finished')

    def _open(self, engine: str, ids: Sequence[str]) -> tuple[FolderLock, OpenedDatabase]:
        if not (self._folder / DATABASE).is_file():
            # The folder must not be created: its file system may not be mounted.
            raise TakeoverRefused(self._trainer, 'its folder contains no journal; correct it in `peer_trainers`')
        if names := differing_settings(self._folder, self._into.folder):
            raise TakeoverRefused(
                self._trainer, f'these settings differ and may change results: {", ".join(names)}; set the same values'
            )
        try:
            lock, source = open_folder(self._folder, engine, is_loss_accepted=False, takers=ids)
        except JournalInUse as error:
            raise TakeoverRefused(self._trainer, 'its process is running; stop it first') from error
        except JournalRefused as error:
            problem = 'its journal is damaged or has another engine or version; start that trainer to check its journal'
            raise TakeoverRefused(self._trainer, problem) from error
        if source.damaged:
            source.connection.close()
            source.mark.close()
            lock.release()
            raise TakeoverRefused(self._trainer, 'its journal is damaged; restore it, or start the trainer')
        return lock, source

    def _insert_adapter(self, tx: Transaction, rows: sqlite3.Connection, row: _AdapterRow) -> str:
        key, adapter_id, number, record, origin, is_fresh = row
        columns = ('adapter_id', 'number', 'record', 'origin', 'is_fresh')
        values = (adapter_id, number, _without_lease(self._into.codec, record), origin, is_fresh)
        new_key = tx.execute(_insertion('adapters', columns), *values).lastrowid
        for table, columns in _ROWS.items():
            query = f'SELECT {", ".join(columns)} FROM {table} WHERE adapter = ?'  # noqa: S608 - constants
            for values in rows.execute(query, (key,)):
                tx.execute(_insertion(table, ('adapter', *columns)), new_key, *values)
        return adapter_id


def _without_lease(codec: RecordCodec, record: bytes) -> bytes:
    """Return the record of an adapter without its lease, which is valid for the ended trainer only."""
    adapter = codec.adapter_from_bytes(record)
    return codec.adapter_to_bytes(replace(adapter, has_lease=False)) if adapter.has_lease else record


def _adapter_ids(tx: Transaction) -> frozenset[str]:
    return frozenset(adapter_id for (adapter_id,) in tx.execute(_ADAPTER_IDS))


def _insertion(table: str, columns: Sequence[str]) -> str:
    """Return the statement that adds a row; an existing row with the same request or id is kept."""
    verb = 'INSERT OR IGNORE' if table in _REQUESTS else 'INSERT'
    return f'{verb} INTO {table} ({", ".join(columns)}) VALUES ({", ".join("?" * len(columns))})'


@contextmanager
def _committed(source: OpenedDatabase) -> Iterator[None]:
    """Run statements in one durable transaction of the other journal."""
    source.connection.execute('BEGIN IMMEDIATE')
    try:
        yield
        count = source.connection.execute(COUNT_COMMIT).fetchone()[0]
        source.connection.execute('COMMIT')
    except BaseException:
        source.connection.execute('ROLLBACK')
        raise
    source.mark.write(count)
