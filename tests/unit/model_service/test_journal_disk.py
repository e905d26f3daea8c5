"""Tests of the journal on disk: failing, full and damaged disks, and crashes."""

import asyncio
import os
import shutil
import sqlite3
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.journals import CODEC, add, batch_operation, forward_result, make_adapter, open_journal, state_of
from twinkle_services.kit import sqlite_seals
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.domain.adapter import ExpiredAdapter
from twinkle_services.model.domain.errors import AdapterDamaged, JournalUnavailable
from twinkle_services.model.domain.journal import Snapshot

LARGE = 20_000
"""Number of tokens of a batch whose payload is stored in a file."""


class Disk:
    """A disk whose sync can be made to fail."""

    def __init__(self) -> None:
        self.is_broken = False

    def sync(self, descriptor: int) -> None:
        """Sync a descriptor, or raise OSError."""
        if self.is_broken:
            raise OSError(5, 'input/output error')
        os.fsync(descriptor)


async def test_operation_with_an_unsynced_payload_is_refused(tmp_path: Path):
    """If a payload cannot be synced, its operation is refused and leaves no file; a later operation succeeds."""
    disk = Disk()
    journal = await open_journal(tmp_path, sync=disk.sync)
    await add(journal, make_adapter())
    disk.is_broken = True
    with pytest.raises(JournalUnavailable):
        await journal.accept(batch_operation(1, length=LARGE))
    assert list(await journal.entries('ad-1', after=0)) == []
    disk.is_broken = False
    await journal.accept(batch_operation(1, length=LARGE))
    await journal.close()
    journal = await open_journal(tmp_path)
    assert len(await journal.entries('ad-1', after=0)) == 1
    assert len(_files(tmp_path / 'payloads')) == 1
    await journal.close()


async def test_unsynced_snapshot_is_not_used(tmp_path: Path):
    """If a snapshot cannot be synced, the earlier snapshot remains and there is no partial file."""
    disk = Disk()
    journal = await open_journal(tmp_path, sync=disk.sync)
    adapter = await add(journal, make_adapter())
    disk.is_broken = True
    with pytest.raises(JournalUnavailable):
        await journal.add_snapshot(Snapshot(sequence_number=0, adapter=adapter, state=state_of(1)))
    assert (await journal.snapshot_before('ad-1')).state is None
    assert _files(tmp_path / 'snapshots') == []
    await journal.close()


async def test_full_disk_refuses_an_operation_and_keeps_outcomes(tmp_path: Path):
    """Operations are refused while the disk is full; recorded outcomes are written once there is space."""
    journal = await open_journal(tmp_path)
    adapter = await add(journal, make_adapter())
    await journal.accept(batch_operation(1))
    await _limit_pages(journal, extra=0)
    journal.note(replace(adapter, sequence_number=1), batch_operation(1), forward_result(batch_operation(1)))
    with pytest.raises(JournalUnavailable):
        await _fill(journal)
    await _limit_pages(journal, extra=10_000)
    assert (await journal.record('ad-1', size=64))[0].outcome is not None
    await journal.close()


async def test_equal_payloads_share_a_file(tmp_path: Path):
    """Operations with equal payloads share a file, which is deleted together with the last of these operations."""
    journal = await open_journal(tmp_path)
    for name in ('ad-1', 'ad-2'):
        await add(journal, make_adapter(name))
    first = batch_operation(1, length=LARGE)
    second = replace(batch_operation(1, 'ad-2', length=LARGE), payload=first.payload)
    await journal.accept(first)
    await journal.accept(second)
    assert len(_files(tmp_path / 'payloads')) == 1
    await journal.remove_adapter('ad-1')
    assert len(_files(tmp_path / 'payloads')) == 1
    await journal.revoke(second)
    assert _files(tmp_path / 'payloads') == []
    await journal.close()


async def test_unneeded_snapshots_and_payloads_are_deleted(tmp_path: Path):
    """Two snapshots remain, and the payloads after the older one; earlier snapshots and payloads are deleted."""
    journal = await open_journal(tmp_path, undo_steps=0)
    adapter = await add(journal, make_adapter())
    for number in range(1, 7):
        operation = batch_operation(number, length=LARGE, seed=number)
        await journal.accept(operation)
        after = replace(adapter, sequence_number=number)
        journal.note(after, operation, forward_result(operation))
        await journal.add_snapshot(Snapshot(sequence_number=number, adapter=after, state=state_of(number)))
    assert len(_files(tmp_path / 'snapshots')) == 2
    assert len(_files(tmp_path / 'payloads')) == 1
    await journal.close()


@pytest.mark.parametrize('folder', ['payloads', 'snapshots'])
async def test_partial_files_are_deleted_at_the_next_start(tmp_path: Path, folder: str):
    """The next start deletes files to which no row refers."""
    await (await open_journal(tmp_path)).close()
    (tmp_path / folder / '.half-abc').write_bytes(b'torn')
    (tmp_path / folder / 'unknown').write_bytes(b'whole, and never recorded')
    await (await open_journal(tmp_path)).close()
    assert _files(tmp_path / folder) == []


async def test_damaged_snapshot_is_replaced_by_the_previous_one(tmp_path: Path):
    """A damaged snapshot is detected, and the adapter is restored from the previous snapshot."""
    journal = await open_journal(tmp_path)
    await _with_snapshots(journal, 2, 4)
    _flip_newest(tmp_path / 'snapshots')
    found = await journal.snapshot_before('ad-1')
    assert found.sequence_number == 2
    assert [entry.operation.sequence_number for entry in await journal.entries('ad-1', after=2)] == [3, 4]
    await journal.close()


async def test_adapter_without_an_intact_snapshot_does_not_affect_others(tmp_path: Path):
    """An adapter without an intact snapshot is reported as damaged; other adapters are restored."""
    journal = await open_journal(tmp_path, undo_steps=0)
    await _with_snapshots(journal, 1, 2, 3)
    for path in _files(tmp_path / 'snapshots'):
        _flip(path)
    await add(journal, make_adapter('ad-2'), state_of(7))
    with pytest.raises(AdapterDamaged) as refusal:
        await journal.snapshot_before('ad-1')
    assert str(tmp_path) not in str(refusal.value)
    assert (await journal.snapshot_before('ad-2')).state is not None
    await journal.close()


@pytest.mark.parametrize('damage', ['flip', 'tear', 'lose'])
async def test_damaged_payload_is_detected(tmp_path: Path, damage: str):
    """A damaged payload is detected and never replayed."""
    journal = await open_journal(tmp_path)
    await add(journal, make_adapter())
    operation = batch_operation(1, length=LARGE)
    await journal.accept(operation)
    (path,) = _files(tmp_path / 'payloads')
    {'flip': _flip, 'tear': lambda file: os.truncate(file, 100), 'lose': Path.unlink}[damage](path)
    with pytest.raises(AdapterDamaged):
        await journal.entries('ad-1', after=0)
    # The same payload, stored again, repairs the file.
    await journal.accept(operation)
    assert len(await journal.entries('ad-1', after=0)) == 1
    await journal.close()


async def test_two_services_cannot_have_one_journal(tmp_path: Path):
    """A second process cannot open the journal until the first one closes it."""
    journal = await open_journal(tmp_path)
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path)
    await journal.close()
    await (await open_journal(tmp_path)).close()


async def test_a_journal_of_another_engine_or_version_is_refused(tmp_path: Path):
    """A journal with adapters of another engine, or of another schema version, is refused."""
    journal = await open_journal(tmp_path, engine='one')
    await journal.close()
    journal = await open_journal(tmp_path, engine='two')
    await add(journal, make_adapter())
    await journal.close()
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path, engine='three')
    with sqlite3.connect(tmp_path / 'journal.sqlite') as database:
        database.execute('PRAGMA user_version=99')
    database.close()
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path, engine='two')


@pytest.mark.parametrize(
    ('version', 'downgrade'), [(1, 'DROP TABLE used_ids;'), (2, '')], ids=['without-used-ids', 'without-attempts']
)
async def test_journal_of_an_older_version_is_upgraded(tmp_path: Path, version: int, downgrade: str):
    """An upgrade from an older version keeps adapters, used ids and operations without an outcome."""
    journal = await open_journal(tmp_path)
    adapter = await add(journal, make_adapter())
    await journal.accept(batch_operation(1))
    await journal.close()
    with sqlite3.connect(tmp_path / 'journal.sqlite') as database:
        sqlite_seals.remove(database)
        downgrade += (
            'DROP TABLE row_seals; DROP TABLE expired_adapters; ALTER TABLE operations DROP COLUMN attempts;'
            f' PRAGMA user_version={version};'
        )
        database.executescript(downgrade)
    database.close()
    (tmp_path / 'journal.sqlite-mark').unlink()
    copy = await SqliteJournal.open_copy(tmp_path, codec=CODEC)
    assert [item.adapter for item in await copy.adapters()] == [adapter]
    assert len(await copy.entries('ad-1', after=0)) == 1
    await copy.close()
    journal = await open_journal(tmp_path)
    assert [(item.adapter, item.is_settled) for item in await journal.adapters()] == [(adapter, False)]
    assert (await journal.creation_of('ad-1')).tenant_id == adapter.tenant_id
    assert await journal.begin_attempt(batch_operation(1)) == 1
    await journal.close()


async def test_sealed_journal_of_an_older_version_is_upgraded(tmp_path: Path):
    """An upgrade of a journal with seals does not accept its damaged rows; later removals are sealed."""
    journal = await open_journal(tmp_path)
    for adapter_id in ('ad-1', 'ad-2'):
        await add(journal, make_adapter(adapter_id))
    await journal.close()
    with sqlite3.connect(tmp_path / 'journal.sqlite') as database:
        database.executescript(
            "DROP TABLE expired_adapters; DELETE FROM row_seals WHERE key LIKE '%expired_adapters%';"
            " DROP TRIGGER seal_update_adapters; DELETE FROM row_seals WHERE key LIKE '%seal_update_adapters%';"
            " UPDATE adapters SET record = x'00' WHERE adapter_id = 'ad-2'; PRAGMA user_version=4;"
        )
    database.close()
    journal = await open_journal(tmp_path)
    expired = ExpiredAdapter(adapter_id='ad-1', tenant_id='alice', checkpoint_path='')
    await journal.remove_adapter('ad-1', expired=expired)
    for _ in range(2):
        assert await journal.expired_adapters() == [expired]
        assert dict(await journal.damaged_adapters()) == {'ad-2': 'alice'}
        await journal.close()
        journal = await open_journal(tmp_path)
    await journal.close()
    with sqlite3.connect(tmp_path / 'journal.sqlite') as database:
        sqlite_seals.prepare(database)
        database.executescript('DROP TRIGGER seal_update_expired_adapters; UPDATE expired_adapters SET tenant_id = 1;')
    database.close()
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path)


async def test_journal_knows_whether_its_last_process_closed_it(tmp_path: Path):
    """A journal that was copied while in use reports that its process was killed; a closed journal does not."""
    journal = await open_journal(tmp_path / 'used')
    assert not journal.was_killed
    shutil.copytree(tmp_path / 'used', tmp_path / 'killed')
    await journal.close()
    for name, was_killed in (('used', False), ('killed', True), ('killed', False)):
        journal = await open_journal(tmp_path / name)
        assert journal.was_killed == was_killed
        await journal.close()


async def test_file_that_is_not_a_database_is_refused(tmp_path: Path):
    """A file that is not a database is refused and not overwritten."""
    (tmp_path / 'journal.sqlite').write_bytes(b'something else' * 100)
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path)
    assert (tmp_path / 'journal.sqlite').read_bytes() == b'something else' * 100


async def test_concurrent_operations_are_durable(tmp_path: Path):
    """A reopened journal contains all operations that were accepted concurrently."""
    journal = await open_journal(tmp_path)
    names = [f'ad-{index}' for index in range(40)]
    for name in names:
        await add(journal, make_adapter(name))
    await asyncio.gather(*(journal.accept(batch_operation(1, name)) for name in names))
    await journal.close()
    journal = await open_journal(tmp_path)
    assert [len(await journal.entries(name, after=0)) for name in names] == [1] * 40
    await journal.close()


async def _with_snapshots(journal, *snapshots):
    adapter = await add(journal, make_adapter())
    for number in range(1, max(snapshots) + 1):
        operation = batch_operation(number)
        await journal.accept(operation)
        after = replace(adapter, sequence_number=number)
        journal.note(after, operation, forward_result(operation))
        if number in snapshots:
            await journal.add_snapshot(Snapshot(sequence_number=number, adapter=after, state=state_of(number)))


async def _fill(journal):
    for number in range(2, 60):
        await journal.accept(batch_operation(number, length=1500))


async def _limit_pages(journal, *, extra):
    def limit(tx):
        pages = tx.execute('PRAGMA page_count').fetchone()[0]
        tx.execute(f'PRAGMA max_page_count={pages + extra}')

    await journal._writer.run(limit)  # noqa: SLF001 - simulates a full disk


def _files(folder: Path) -> list[Path]:
    return sorted(folder.iterdir())


def _flip_newest(folder: Path) -> None:
    _flip(max(_files(folder), key=lambda path: path.name))


def _flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
