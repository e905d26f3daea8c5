"""A journal on disk: rows in SQLite, with large payloads and snapshots as files.

A file is made durable before the row that names it, and is deleted after that row. The next start deletes files that
have no row because of a crash.
"""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TypeVar

import structlog

from twinkle_services.kit.errors import DomainError, InvalidField
from twinkle_services.kit.failpoints import reach
from twinkle_services.kit.worker import Threads
from twinkle_services.model.backends.journal import rows
from twinkle_services.model.backends.journal.group_commit import Transaction, Writer, disk_errors_as_unavailable
from twinkle_services.model.backends.journal.payloads import PayloadDamaged, Payloads
from twinkle_services.model.backends.journal.schema import DATABASE, FolderLock, open_folder, open_to_read
from twinkle_services.model.backends.journal.snapshots import SnapshotDamaged, SnapshotFiles
from twinkle_services.model.backends.journal.takeover import Takeover, TargetJournal, journal_ids
from twinkle_services.model.domain.adapter import Adapter, CreationRecord, ExpiredAdapter
from twinkle_services.model.domain.engine import AdapterState
from twinkle_services.model.domain.errors import AdapterDamaged
from twinkle_services.model.domain.journal import JournaledAdapter, JournalEntry, RecordEntry, Snapshot
from twinkle_services.model.domain.operation import Operation
from twinkle_services.model.domain.result import OperationResult
from twinkle_services.model.domain.retention import ReplayKind, is_applied_step
from twinkle_services.model.ports import RecordCodec

_log = structlog.get_logger('journal')
_Result = TypeVar('_Result')

INLINE_BYTES = 16 << 10
"""Payloads up to this size are stored in the database, which is cheaper than a file with two syncs (docs/LOG.md)."""


class SqliteJournal:
    """Implements `twinkle_services.model.ports.Journal`."""

    def __init__(
        self, writer: Writer, payloads: Payloads, snapshots: SnapshotFiles, *, codec: RecordCodec, undo_steps: int
    ) -> None:
        """Create a journal from its parts. Callers use `open` or `open_copy` instead."""
        self._writer = writer
        self._payloads = payloads
        self._snapshots = snapshots
        self._codec = codec
        self._undo_steps = undo_steps
        self._threads = Threads('journal-files', count=4)
        self._lock: FolderLock | None = None
        self._damaged: dict[str, str] = {}
        self._unreadable: frozenset[str] = frozenset()
        self._engine, self._folder = '', Path()
        self.was_killed = False
        self.ids: tuple[str, ...] = ()
        self._moved: set[str] = set()  # adapters that were taken over and may not be registered yet
        self.peers: Mapping[str, Path] = {}
        """Folders of journals that can be taken over, by trainer."""

    @classmethod
    async def open(
        cls,
        folder: Path,
        *,
        codec: RecordCodec,
        engine: str,
        undo_steps: int = 8,
        is_loss_accepted: bool = False,
        sync: Callable[[int], None] = os.fsync,
    ) -> 'SqliteJournal':
        """Open or create the journal in `folder`, and delete files that no row names, unless rows are damaged.

        Args:
            folder: Folder of the journal, which must not contain other files.
            codec: Serializes records.
            engine: Name of the engine, such as base model and dtype.
            undo_steps: Maximum number of steps of an adapter that can be undone.
            is_loss_accepted: See `open_database`.
            sync: Flushes a file descriptor to disk.

        Raises:
            JournalRefused, JournalUnavailable: The journal is in use or cannot be used, or the disk failed.
        """
        lock, database = await asyncio.to_thread(open_folder, folder, engine, is_loss_accepted=is_loss_accepted)
        journal = cls(
            Writer(database.connection, mark=database.mark),
            Payloads(folder / 'payloads', sync=sync),
            SnapshotFiles(folder / 'snapshots', sync=sync),
            codec=codec,
            undo_steps=undo_steps,
        )
        journal._lock, journal._damaged, journal._unreadable = lock, dict(database.damaged), database.unreadable
        journal._engine, journal._folder = engine, folder
        await journal._sweep()
        journal.was_killed = await journal._run('', rows.begin_use)
        journal.ids = await journal._run('', journal_ids)
        return journal

    @classmethod
    async def open_copy(cls, folder: Path, *, codec: RecordCodec) -> 'SqliteJournal':
        """Open a journal read-only. The folder must be a copy, or its service must be stopped.

        Raises:
            JournalRefused: The folder contains no readable journal.
        """
        writer = Writer(open_to_read(folder / DATABASE))
        payloads = Payloads(folder / 'payloads', sync=os.fsync)
        snapshots = SnapshotFiles(folder / 'snapshots', sync=os.fsync)
        return cls(writer, payloads, snapshots, codec=codec, undo_steps=0)

    async def forget_crashes(self) -> None:
        """Reset the attempt counts of all pieces of work and all operations, durably."""
        await self._run('', rows.remove_all_counts)

    async def adapters(self) -> Sequence[JournaledAdapter]:
        found = [item for item in await self._run('', rows.all_adapters) if item[0] not in self._unreadable]
        readable = [(self._adapter_of(record), is_settled) for _, record, is_settled in found]
        return [JournaledAdapter(adapter=adapter, is_settled=is_settled) for adapter, is_settled in readable if adapter]

    async def damaged_adapters(self) -> Mapping[str, str]:
        return {adapter_id: tenant for adapter_id, tenant in self._damaged.items() if adapter_id in self._unreadable}

    async def creations(self) -> Sequence[CreationRecord]:
        return await self._run('', rows.all_creations)

    async def creation_of(self, adapter_id: str) -> CreationRecord | None:
        return await self._run(adapter_id, lambda tx: rows.creation_of(tx, adapter_id))

    async def add_adapter(
        self, adapter: Adapter, creation: CreationRecord, *, origin: Adapter, state: AdapterState | None
    ) -> None:
        record, first = self._codec.adapter_to_bytes(adapter), self._codec.adapter_to_bytes(origin)
        async with self._snapshot_row(adapter, 0, state) as row:

            def add(tx: Transaction) -> None:
                key = rows.add_adapter(tx, adapter.adapter_id, record, first, is_fresh=state is None)
                rows.add_creation(tx, creation)
                if row is not None:
                    rows.add_snapshot(tx, key, row)

            await self._run(adapter.adapter_id, add)

    async def remove_adapter(self, adapter_id: str, *, expired: ExpiredAdapter | None = None) -> None:
        is_damaged = adapter_id in self._damaged

        def remove(tx: Transaction) -> None:
            self._drop(tx, rows.remove_adapter(tx, adapter_id, is_damaged=is_damaged, expired=expired))

        await self._run('', remove)
        self._damaged.pop(adapter_id, None)

    async def expired_adapters(self) -> Sequence[ExpiredAdapter]:
        return await self._run('', rows.all_expired)

    async def take_over(self, trainer: str) -> Sequence[JournaledAdapter]:
        if trainer not in self.peers:
            raise InvalidField('trainer', f'{trainer!r} is not in the setting `peer_trainers` of the model service')
        into = TargetJournal(self._folder, self._writer, self._payloads, self._snapshots, self._codec, self._moved)
        with disk_errors_as_unavailable(''):
            await Takeover(trainer, self.peers[trainer], into).run(self._engine, await self._run('', journal_ids))
        return [item for item in await self.adapters() if item.adapter.adapter_id in self._moved]

    async def complete_take_over(self) -> None:
        self.ids = await self._run('', journal_ids)
        self._moved.clear()

    async def accept(self, operation: Operation) -> None:
        if len(operation.payload) <= INLINE_BYTES:
            await self._accept(operation, payload=operation.payload, digest=None)
            return
        with disk_errors_as_unavailable(operation.adapter_id):
            digest = await self._threads.run(self._payloads.put, operation.payload)
        try:
            await self._accept(operation, payload=None, digest=digest)
        finally:
            self._payloads.unpin(digest)

    async def begin_attempt(self, operation: Operation) -> int:
        adapter_id, number = operation.adapter_id, operation.sequence_number
        return await self._run(adapter_id, lambda tx: rows.add_attempt(tx, rows.key_of(tx, adapter_id), number))

    def end_attempt(self, operation: Operation) -> None:
        adapter_id, number = operation.adapter_id, operation.sequence_number
        self._writer.add(lambda tx: rows.reset_attempts(tx, rows.key_of(tx, adapter_id), number))

    async def count_attempt(self, work: str) -> int:
        return await self._run('', lambda tx: rows.count_attempt(tx, work))

    async def note_progress(self, work: str, *, position: int) -> None:
        await self._run('', lambda tx: rows.note_progress(tx, work, position))

    def reset_attempts(self, work: str) -> None:
        self._writer.add(lambda tx: rows.remove_count(tx, work))

    async def revoke(self, operation: Operation) -> None:
        def delete(tx: Transaction) -> None:
            key = rows.key_of(tx, operation.adapter_id)
            self._drop(tx, rows.delete_operation(tx, key, operation.sequence_number))

        await self._run(operation.adapter_id, delete)

    def note(self, adapter: Adapter, operation: Operation, outcome: OperationResult | DomainError) -> None:
        record, outcome_bytes = self._codec.adapter_to_bytes(adapter), self._codec.outcome_to_bytes(outcome)
        number, is_step = operation.sequence_number, is_applied_step(operation, outcome)

        def write(tx: Transaction) -> None:
            key = rows.key_of(tx, adapter.adapter_id)
            rows.set_outcome(tx, key, number, outcome_bytes)
            rows.update_adapter(tx, key, adapter.sequence_number, record)
            if is_step:
                rows.add_step(tx, key, number)

        self._writer.add(write)

    async def settle(
        self,
        adapter: Adapter,
        operation: Operation,
        outcome: OperationResult | DomainError,
        *,
        state: AdapterState | None = None,
        undone_from: int | None = None,
    ) -> None:
        record, outcome_bytes = self._codec.adapter_to_bytes(adapter), self._codec.outcome_to_bytes(outcome)
        kind, number = ReplayKind.SKIPPED if state is None else ReplayKind.BARRIER, operation.sequence_number
        settled = rows.OperationRow(number, kind, operation.fingerprint, outcome=outcome_bytes)
        async with self._snapshot_row(adapter, number, state) as row:

            def write(tx: Transaction) -> None:
                key = rows.key_of(tx, adapter.adapter_id)
                dropped = rows.put_operation(tx, key, settled)
                rows.update_adapter(tx, key, adapter.sequence_number, record)
                if undone_from is not None:
                    dropped += rows.undo(tx, key, undone_from, number)
                if row is not None:
                    dropped += rows.add_snapshot(tx, key, row) + rows.trim(tx, key, undo_steps=self._undo_steps)
                    tx.after_commit.append(self._writer.shorten_log)
                self._drop(tx, dropped)

            await self._run(adapter.adapter_id, write)

    async def add_snapshot(self, snapshot: Snapshot) -> None:
        adapter = snapshot.adapter
        async with self._snapshot_row(adapter, snapshot.sequence_number, snapshot.state) as row:
            if row is None:
                return

            def write(tx: Transaction) -> None:
                key = rows.key_of(tx, adapter.adapter_id)
                dropped = rows.add_snapshot(tx, key, row)
                self._drop(tx, dropped + rows.trim(tx, key, undo_steps=self._undo_steps))
                tx.after_commit.append(self._writer.shorten_log)

            await self._run(adapter.adapter_id, write)
        reach('snapshot.recorded')

    async def amend(self, adapter: Adapter) -> None:
        adapter_id, number, record = adapter.adapter_id, adapter.sequence_number, self._codec.adapter_to_bytes(adapter)
        await self._run(adapter_id, lambda tx: rows.update_adapter(tx, rows.key_of(tx, adapter_id), number, record))

    async def snapshot_before(self, adapter_id: str, *, at_most: int | None = None) -> Snapshot:
        for row in await self._run(adapter_id, lambda tx: rows.snapshots_before(tx, adapter_id, at_most)):
            adapter = self._adapter_of(row.record)
            if adapter is None:
                continue
            if row.file is None:
                return Snapshot(sequence_number=0, adapter=adapter, state=None)
            try:
                state = await self._threads.run(
                    self._snapshots.read, row.file, lora_config=adapter.lora_config, step_count=adapter.step_count
                )
            except (SnapshotDamaged, OSError) as error:
                _log.error('snapshot damaged', adapter=adapter_id, operation=row.number, error=str(error))
            else:
                return Snapshot(sequence_number=row.number, adapter=adapter, state=state)
        raise AdapterDamaged(adapter_id, 'none of the snapshots can be read')

    async def entries(self, adapter_id: str, *, after: int, until: int | None = None) -> Sequence[JournalEntry]:
        found = await self._run(adapter_id, lambda tx: rows.operations_between(tx, adapter_id, after, until))
        last = until if until is not None else max((row.number for row in found), default=after)
        if [row.number for row in found] != list(range(after + 1, last + 1)):
            raise AdapterDamaged(adapter_id, f'operations between {after} and {last} are missing')
        return await self._threads.run(self._entries, adapter_id, found)

    async def record(self, adapter_id: str, *, size: int) -> Sequence[RecordEntry]:
        found = await self._run(adapter_id, lambda tx: rows.last_operations(tx, adapter_id, size))
        try:
            return [
                RecordEntry(sequence_number=number, fingerprint=fingerprint, outcome=self._outcome(outcome))
                for number, fingerprint, outcome in found
            ]
        except Exception as error:
            raise AdapterDamaged(adapter_id, 'an outcome on record cannot be read') from error

    async def applied_steps(self, adapter_id: str) -> Sequence[int]:
        return await self._run(adapter_id, lambda tx: rows.undoable_steps(tx, adapter_id, self._undo_steps))

    async def close(self) -> None:
        if self._lock is not None:
            self._writer.add(rows.end_use)
        await self._writer.close()
        self._threads.close()
        if self._lock is not None:
            self._lock.release()

    async def _accept(self, operation: Operation, *, payload: bytes | None, digest: str | None) -> None:
        number, mark = operation.sequence_number, operation.fingerprint
        row = rows.OperationRow(number, ReplayKind.REPLAYED, mark, payload=payload, digest=digest)

        def put(tx: Transaction) -> None:
            self._drop(tx, rows.put_operation(tx, rows.key_of(tx, operation.adapter_id), row))

        await self._run(operation.adapter_id, put)

    @asynccontextmanager
    async def _snapshot_row(
        self, adapter: Adapter, number: int, state: AdapterState | None
    ) -> AsyncIterator[rows.SnapshotRow | None]:
        """Write a state to a file and yield its row, or None without a state; delete the file if the block fails."""
        if state is None:
            yield None
            return
        with disk_errors_as_unavailable(adapter.adapter_id):
            file = await self._threads.run(self._snapshots.write, state)
        is_recorded = False
        try:
            yield rows.SnapshotRow(number, file, self._codec.adapter_to_bytes(adapter))
            is_recorded = True
        finally:
            if not is_recorded:
                self._snapshots.drop(file.name)

    def _entries(self, adapter_id: str, found: Sequence[rows.OperationRow]) -> list[JournalEntry]:
        entries = list[JournalEntry]()
        for row in found:
            if row.kind is ReplayKind.SKIPPED:
                continue
            if row.kind is ReplayKind.BARRIER:
                raise AdapterDamaged(adapter_id, f'operation {row.number} cannot be replayed')
            entries.append(self._entry(adapter_id, row))
        return entries

    def _entry(self, adapter_id: str, row: rows.OperationRow) -> JournalEntry:
        payload = self._payload(adapter_id, row)
        try:
            operation = self._codec.operation_from_bytes(payload)
            outcome = self._outcome(row.outcome)
        except Exception as error:
            raise AdapterDamaged(adapter_id, f'operation {row.number} cannot be read') from error
        # SQLite verifies the database's structure, not its content.
        if (operation.fingerprint, operation.sequence_number) != (row.fingerprint, row.number):
            raise AdapterDamaged(adapter_id, f'operation {row.number} is damaged: its fingerprint does not match')
        return JournalEntry(operation=operation, outcome=outcome)

    def _adapter_of(self, record: bytes) -> Adapter | None:
        """Return an adapter, or None if its record is damaged, so that other adapters can still be used."""
        try:
            return self._codec.adapter_from_bytes(record)
        except Exception:
            _log.exception('adapter record damaged')
            return None

    def _payload(self, adapter_id: str, row: rows.OperationRow) -> bytes:
        if row.payload is not None:
            return row.payload
        if row.digest is None:
            raise AdapterDamaged(adapter_id, f'operation {row.number} is no longer stored')
        try:
            return self._payloads.get(row.digest)
        except (PayloadDamaged, OSError) as error:
            raise AdapterDamaged(adapter_id, f'operation {row.number}: {error}') from error

    def _outcome(self, data: bytes | None) -> OperationResult | DomainError | None:
        return None if data is None else self._codec.outcome_from_bytes(data)

    def _drop(self, tx: Transaction, dropped: rows.UnusedFiles) -> None:
        for name in dropped.snapshots:
            tx.after_commit.append(lambda name=name: self._snapshots.drop(name))
        for digest in dropped.digests:
            tx.after_commit.append(lambda digest=digest: self._payloads.drop(digest))

    async def _run(self, adapter_id: str, work: Callable[[Transaction], _Result]) -> _Result:
        if adapter_id in self._damaged:
            raise AdapterDamaged(adapter_id, 'rows of the adapter differ from what was written')
        with disk_errors_as_unavailable(adapter_id):
            return await self._writer.run(work)

    async def _sweep(self) -> None:
        if self._damaged:
            # A backup of the database may name files that the damaged rows no longer name.
            return
        snapshots, digests = await self._run('', rows.all_files)
        swept = await self._threads.run(self._snapshots.sweep, snapshots)
        swept += await self._threads.run(self._payloads.sweep, digests)
        if swept:
            _log.info('unused files deleted', files=swept)
