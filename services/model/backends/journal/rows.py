"""SQL statements of the journal. Each function runs in a transaction of the writer."""

from collections.abc import Sequence
from dataclasses import dataclass

from twinkle_services.kit import sqlite_seals
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.model.backends.journal.group_commit import Transaction
from twinkle_services.model.backends.journal.schema import ADAPTER_TABLES
from twinkle_services.model.backends.journal.snapshots import SnapshotFile
from twinkle_services.model.domain.adapter import MAX_CREATIONS, MAX_EXPIRED, CreationRecord, ExpiredAdapter
from twinkle_services.model.domain.retention import ReplayKind, retain
from twinkle_services.model.domain.sequence import RECORD_LENGTH

_USES = 'open journals'
"""Name of the count of processes that opened the journal without closing it."""


@dataclass(frozen=True)
class OperationRow:
    """A row of the table `operations`."""

    number: int
    kind: ReplayKind
    fingerprint: str
    payload: bytes | None = None
    digest: str | None = None
    outcome: bytes | None = None


@dataclass(frozen=True)
class SnapshotRow:
    """A row of the table `snapshots`; a row without a file represents the adapter's creation."""

    number: int
    file: SnapshotFile | None
    record: bytes


@dataclass(frozen=True)
class UnusedFiles:
    """Files to which no row refers any more."""

    snapshots: tuple[str, ...] = ()
    digests: tuple[str, ...] = ()

    def __add__(self, other: 'UnusedFiles') -> 'UnusedFiles':
        return UnusedFiles(self.snapshots + other.snapshots, self.digests + other.digests)


def key_of(tx: Transaction, adapter_id: str) -> int:
    """Return the key of an adapter's rows.

    Raises:
        AdapterNotFound: There is no such adapter.
    """
    row = tx.execute('SELECT key FROM adapters WHERE adapter_id = ?', adapter_id).fetchone()
    if row is None:
        raise AdapterNotFound(adapter_id)
    return row[0]


def all_adapters(tx: Transaction) -> list[tuple[str, bytes, bool]]:
    """Return each adapter's id and record, and whether all its operations have outcomes; oldest first."""
    unsettled = {key for (key,) in tx.execute('SELECT DISTINCT adapter FROM operations WHERE outcome IS NULL')}
    found = tx.execute('SELECT key, adapter_id, record FROM adapters ORDER BY key')
    return [(adapter_id, record, key not in unsettled) for key, adapter_id, record in found]


def all_creations(tx: Transaction) -> list[CreationRecord]:
    """Return the latest creation requests, oldest first."""
    rows = tx.execute('SELECT tenant_id, request_id, fingerprint, adapter_id FROM creations ORDER BY position')
    return [
        CreationRecord(tenant_id=tenant, request_id=request, fingerprint=fingerprint, adapter_id=adapter)
        for tenant, request, fingerprint, adapter in rows
    ]


def creation_of(tx: Transaction, adapter_id: str) -> CreationRecord | None:
    """Return the request that created an adapter, even a deleted one; None if the id was never used."""
    columns = 'tenant_id, request_id, fingerprint'
    row = tx.execute(f'SELECT {columns} FROM used_ids WHERE adapter_id = ?', adapter_id).fetchone()  # noqa: S608
    if row is None:
        return None
    return CreationRecord(tenant_id=row[0], request_id=row[1], fingerprint=row[2], adapter_id=adapter_id)


def add_adapter(tx: Transaction, adapter_id: str, record: bytes, origin: bytes, *, is_fresh: bool) -> int:
    """Add an adapter and return its key."""
    cursor = tx.execute(
        'INSERT INTO adapters (adapter_id, number, record, origin, is_fresh) VALUES (?, 0, ?, ?, ?)',
        adapter_id,
        record,
        origin,
        is_fresh,
    )
    assert cursor.lastrowid is not None  # noqa: S101 - a row was inserted
    return cursor.lastrowid


def add_creation(tx: Transaction, creation: CreationRecord) -> None:
    """Add a creation request, and delete the oldest ones above MAX_CREATIONS; the used id is stored permanently."""
    tx.execute(
        'INSERT OR REPLACE INTO creations (tenant_id, request_id, fingerprint, adapter_id) VALUES (?, ?, ?, ?)',
        creation.tenant_id,
        creation.request_id,
        creation.fingerprint,
        creation.adapter_id,
    )
    tx.execute(
        'INSERT INTO used_ids (adapter_id, tenant_id, request_id, fingerprint) VALUES (?, ?, ?, ?)',
        creation.adapter_id,
        creation.tenant_id,
        creation.request_id,
        creation.fingerprint,
    )
    tx.execute('DELETE FROM creations WHERE position <= (SELECT max(position) FROM creations) - ?', MAX_CREATIONS)


def remove_adapter(
    tx: Transaction, adapter_id: str, *, is_damaged: bool = False, expired: ExpiredAdapter | None = None
) -> UnusedFiles:
    """Delete an adapter and all its rows, record `expired`, and return the files that no row names any more.

    Do nothing if the adapter does not exist. The rows of a damaged adapter may name files of other adapters, so its
    files are not returned. The next start deletes unused files.
    """
    row = tx.execute('SELECT key FROM adapters WHERE adapter_id = ?', adapter_id).fetchone()
    if row is None:
        return UnusedFiles()
    if expired is not None:
        _add_expired(tx, expired)
    if is_damaged:
        tx.execute('DELETE FROM adapters WHERE key = ?', row[0])
        sqlite_seals.forget(tx.connection, ADAPTER_TABLES, row[0])
        return UnusedFiles()
    files = tuple(name for (name,) in tx.execute('SELECT file FROM snapshots WHERE adapter = ?', row[0]))
    digests = _digests(tx, 'adapter = ?', row[0])
    tx.execute('DELETE FROM adapters WHERE key = ?', row[0])
    tx.execute('DELETE FROM meta WHERE substr(name, -length(?1)) = ?1', f' of {adapter_id}')
    return UnusedFiles(files, _unneeded(tx, digests))


def all_expired(tx: Transaction) -> list[ExpiredAdapter]:
    """Return the records of expired adapters, oldest first."""
    found = tx.execute('SELECT adapter_id, tenant_id, checkpoint_path FROM expired_adapters ORDER BY position')
    return [ExpiredAdapter(adapter_id=row[0], tenant_id=row[1], checkpoint_path=row[2]) for row in found]


def put_operation(tx: Transaction, key: int, row: OperationRow) -> UnusedFiles:
    """Add an operation, or replace the one with the same number, and return its payload file if that became unused."""
    replaced = _digests(tx, 'adapter = ? AND number = ?', key, row.number)
    tx.execute(
        'INSERT OR REPLACE INTO operations (adapter, number, kind, fingerprint, payload, digest, outcome)'
        ' VALUES (?, ?, ?, ?, ?, ?, ?)',
        key,
        row.number,
        int(row.kind),
        row.fingerprint,
        row.payload,
        row.digest,
        row.outcome,
    )
    return UnusedFiles(digests=_unneeded(tx, replaced))


def delete_operation(tx: Transaction, key: int, number: int) -> UnusedFiles:
    """Delete an operation, and return its payload file if no other row names the file."""
    digests = _digests(tx, 'adapter = ? AND number = ?', key, number)
    tx.execute('DELETE FROM operations WHERE adapter = ? AND number = ?', key, number)
    return UnusedFiles(digests=_unneeded(tx, digests))


def set_outcome(tx: Transaction, key: int, number: int, outcome: bytes) -> None:
    """Record the outcome of an operation."""
    tx.execute('UPDATE operations SET outcome = ? WHERE adapter = ? AND number = ?', outcome, key, number)


def add_attempt(tx: Transaction, key: int, number: int) -> int:
    """Count an attempt to replay an operation, and return the number of attempts."""
    where = 'adapter = ? AND number = ?'
    tx.execute(f'UPDATE operations SET attempts = attempts + 1 WHERE {where}', key, number)  # noqa: S608 - constant
    return tx.execute(f'SELECT attempts FROM operations WHERE {where}', key, number).fetchone()[0]  # noqa: S608


def reset_attempts(tx: Transaction, key: int, number: int) -> None:
    """Reset the number of attempts to replay an operation."""
    tx.execute('UPDATE operations SET attempts = 0 WHERE adapter = ? AND number = ?', key, number)


def update_adapter(tx: Transaction, key: int, number: int, record: bytes) -> None:
    """Update an adapter's record, unless a later operation has already updated it."""
    tx.execute('UPDATE adapters SET number = ?, record = ? WHERE key = ? AND number <= ?', number, record, key, number)


def add_step(tx: Transaction, key: int, number: int) -> None:
    """Record that an operation applied a step."""
    tx.execute('INSERT OR IGNORE INTO steps VALUES (?, ?)', key, number)


def add_snapshot(tx: Transaction, key: int, row: SnapshotRow) -> UnusedFiles:
    """Add a snapshot, or replace the one after the same operation, and return the replaced file."""
    replaced = tx.execute('SELECT file FROM snapshots WHERE adapter = ? AND number = ?', key, row.number).fetchall()
    if row.file is not None:
        values = (key, row.number, row.file.name, row.file.digest, row.record)
        tx.execute('INSERT OR REPLACE INTO snapshots VALUES (?, ?, ?, ?, ?)', *values)
    return UnusedFiles(snapshots=tuple(name for (name,) in replaced))


def undo(tx: Transaction, key: int, undone_from: int, number: int) -> UnusedFiles:
    """Delete the snapshots, steps and payloads of the operations that operation `number` undid; return unused files."""
    where = 'adapter = ? AND number >= ? AND number < ?'
    span = (key, undone_from, number)
    files = tuple(name for (name,) in tx.execute(f'SELECT file FROM snapshots WHERE {where}', *span))  # noqa: S608
    digests = _digests(tx, where, *span)
    tx.execute(f'DELETE FROM snapshots WHERE {where}', *span)  # noqa: S608 - constants of this function
    tx.execute(f'DELETE FROM steps WHERE {where}', *span)  # noqa: S608
    tx.execute(f'UPDATE operations SET payload = NULL, digest = NULL WHERE {where}', *span)  # noqa: S608
    return UnusedFiles(files, _unneeded(tx, digests))


def trim(tx: Transaction, key: int, *, undo_steps: int) -> UnusedFiles:
    """Delete an adapter's rows and payloads that no restore, undo or repeat needs, and return the unused files."""
    roots = _roots(tx, key)
    retention = retain(_steps(tx, key), roots, undo_steps=undo_steps)
    for number in set(_steps(tx, key)) - set(retention.steps):
        tx.execute('DELETE FROM steps WHERE adapter = ? AND number = ?', key, number)
    files = list[str]()
    for number in set(roots) - retention.snapshots:
        where = (key, number)
        files += [name for (name,) in tx.execute('SELECT file FROM snapshots WHERE adapter = ? AND number = ?', *where)]
        tx.execute('DELETE FROM snapshots WHERE adapter = ? AND number = ?', *where)
    if 0 not in retention.snapshots:
        tx.execute('UPDATE adapters SET is_fresh = 0 WHERE key = ?', key)
    rows = tx.execute('SELECT number FROM operations WHERE adapter = ? AND outcome IS NOT NULL', key).fetchall()
    unneeded = [number for (number,) in rows if not retention.is_replayable(number)]
    return UnusedFiles(tuple(files)) + _delete_payloads(tx, key, unneeded)


def snapshots_before(tx: Transaction, adapter_id: str, at_most: int | None) -> list[SnapshotRow]:
    """Return the snapshots of the states up to operation `at_most`, newest first; None selects all snapshots."""
    key = key_of(tx, adapter_id)
    limit = at_most if at_most is not None else 1 << 62
    rows = tx.execute(
        'SELECT number, file, digest, record FROM snapshots WHERE adapter = ? AND number <= ? ORDER BY number DESC',
        key,
        limit,
    )
    found = [SnapshotRow(number, SnapshotFile(file, digest), record) for number, file, digest, record in rows]
    origin, is_fresh = tx.execute('SELECT origin, is_fresh FROM adapters WHERE key = ?', key).fetchone()
    return [*found, SnapshotRow(0, None, origin)] if is_fresh else found


def operations_between(tx: Transaction, adapter_id: str, after: int, until: int | None) -> list[OperationRow]:
    """Return the operations after `after`, up to and including `until`, in order; None for no upper limit."""
    rows = tx.execute(
        'SELECT number, kind, fingerprint, payload, digest, outcome FROM operations'
        ' WHERE adapter = ? AND number > ? AND number <= ? ORDER BY number',
        key_of(tx, adapter_id),
        after,
        until if until is not None else 1 << 62,
    )
    return [OperationRow(row[0], ReplayKind(row[1]), *row[2:]) for row in rows]


def last_operations(tx: Transaction, adapter_id: str, size: int) -> list[tuple[int, str, bytes | None]]:
    """Return the number, the fingerprint and the outcome of the last `size` operations, in order."""
    rows = tx.execute(
        'SELECT number, fingerprint, outcome FROM operations WHERE adapter = ? ORDER BY number DESC LIMIT ?',
        key_of(tx, adapter_id),
        size,
    )
    return rows.fetchall()[::-1]


def undoable_steps(tx: Transaction, adapter_id: str, undo_steps: int) -> tuple[int, ...]:
    """Return the steps that can be undone, in order."""
    key = key_of(tx, adapter_id)
    return retain(_steps(tx, key), _roots(tx, key), undo_steps=undo_steps).steps


def all_files(tx: Transaction) -> tuple[set[str], set[str]]:
    """Return the names of all snapshot files and payloads that rows refer to."""
    snapshots = {name for (name,) in tx.execute('SELECT file FROM snapshots')}
    digests = {digest for (digest,) in tx.execute('SELECT digest FROM operations WHERE digest IS NOT NULL')}
    return snapshots, digests


def _steps(tx: Transaction, key: int) -> list[int]:
    return [number for (number,) in tx.execute('SELECT number FROM steps WHERE adapter = ? ORDER BY number', key)]


def _roots(tx: Transaction, key: int) -> list[int]:
    numbers = [
        number for (number,) in tx.execute('SELECT number FROM snapshots WHERE adapter = ? ORDER BY number', key)
    ]
    is_fresh = tx.execute('SELECT is_fresh FROM adapters WHERE key = ?', key).fetchone()[0]
    return [0, *numbers] if is_fresh else numbers


def _delete_payloads(tx: Transaction, key: int, numbers: Sequence[int]) -> UnusedFiles:
    """Delete payloads of operations, and rows that are too old to be on record, and return the unused files."""
    newest = tx.execute('SELECT max(number) FROM operations WHERE adapter = ?', key).fetchone()[0]
    digests = list[str]()
    for number in numbers:
        digests += _digests(tx, 'adapter = ? AND number = ?', key, number)
        if number <= newest - RECORD_LENGTH:
            tx.execute('DELETE FROM operations WHERE adapter = ? AND number = ?', key, number)
        else:
            tx.execute(
                'UPDATE operations SET payload = NULL, digest = NULL WHERE adapter = ? AND number = ?', key, number
            )
    return UnusedFiles(digests=_unneeded(tx, digests))


def _digests(tx: Transaction, where: str, *values: object) -> list[str]:
    statement = f'SELECT digest FROM operations WHERE {where} AND digest IS NOT NULL'  # noqa: S608 - constants of this module
    return [digest for (digest,) in tx.execute(statement, *values)]


def _unneeded(tx: Transaction, digests: Sequence[str]) -> tuple[str, ...]:
    statement = 'SELECT 1 FROM operations WHERE digest = ? LIMIT 1'
    return tuple(digest for digest in sorted(set(digests)) if tx.execute(statement, digest).fetchone() is None)


def count_attempt(tx: Transaction, work: str) -> int:
    """Count an attempt at a piece of work, and return the number of attempts."""
    tx.execute("INSERT INTO meta VALUES (?, '1') ON CONFLICT (name) DO UPDATE SET value = value + 1", work)
    return int(tx.execute('SELECT value FROM meta WHERE name = ?', work).fetchone()[0])


def note_progress(tx: Transaction, work: str, position: int) -> None:
    """Store `position`, and set the attempts to 1, if no attempt since the last reset has reached `position`."""
    statement = 'INSERT INTO meta VALUES (?, ?) ON CONFLICT (name) DO UPDATE SET value = excluded.value'
    known = tx.execute('SELECT value FROM meta WHERE name = ?', _progress_of(work)).fetchone()
    if known is None or int(known[0]) < position:
        tx.execute(statement, _progress_of(work), str(position))
        tx.execute(statement, work, '1')


def remove_count(tx: Transaction, work: str) -> None:
    """Remove the number of attempts at a piece of work, and its progress."""
    tx.execute('DELETE FROM meta WHERE name IN (?, ?)', work, _progress_of(work))


def remove_all_counts(tx: Transaction) -> None:
    """Remove the attempt counts and the progress of all pieces of work, and reset the counts of all operations."""
    tx.execute("DELETE FROM meta WHERE name LIKE '% of %'")
    tx.execute('UPDATE operations SET attempts = 0 WHERE attempts > 0')


def _progress_of(work: str) -> str:
    return f'progress of {work}'


def begin_use(tx: Transaction) -> bool:
    """Record that a process uses the journal; return whether the previous process ended without `end_use`."""
    return count_attempt(tx, _USES) > 1


def end_use(tx: Transaction) -> None:
    """Record that the process closes the journal."""
    remove_count(tx, _USES)


def _add_expired(tx: Transaction, expired: ExpiredAdapter) -> None:
    values = (expired.adapter_id, expired.tenant_id, expired.checkpoint_path)
    tx.execute('INSERT INTO expired_adapters (adapter_id, tenant_id, checkpoint_path) VALUES (?, ?, ?)', *values)
    newest = '(SELECT max(position) FROM expired_adapters)'
    tx.execute(f'DELETE FROM expired_adapters WHERE position <= {newest} - ?', MAX_EXPIRED)  # noqa: S608 - constant
