"""Tests of damaged values in the journal's database, and of a missing database."""

import sqlite3
from pathlib import Path

import pytest

from fixtures.journals import add, batch_operation, forward_result, make_adapter, open_journal, state_of
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.model.application.directory import AdapterDirectory
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.domain.errors import AdapterDamaged
from twinkle_services.model.domain.journal import Snapshot


def _opened(folder: Path) -> sqlite3.Connection:
    """Return a connection whose changes leave the seals of rows invalid, as damage to the file does."""
    database = sqlite3.connect(folder / 'journal.sqlite')
    database.create_function('row_seal', -1, lambda *values: b'invalid')
    return database


def _damage(folder: Path, column: str, table: str) -> None:
    """Change a byte in the middle of one value in the first adapter's row."""
    with _opened(folder) as database:
        key, value = database.execute(f'SELECT rowid, {column} FROM {table} ORDER BY rowid LIMIT 1').fetchone()
        middle = len(value) // 2
        changed = value[:middle] + bytes([value[middle] ^ 1]) + value[middle + 1 :]
        database.execute(f'UPDATE {table} SET {column} = ? WHERE rowid = ?', (changed, key))
    database.close()


def _destroy(folder: Path, column: str, table: str) -> None:
    """Make one value in the first adapter's row unreadable."""
    with _opened(folder) as database:
        database.execute(
            f'UPDATE {table} SET {column} = ? WHERE rowid = (SELECT min(rowid) FROM {table})', (b'\xff' * 40,)
        )
    database.close()


async def _two_adapters(folder: Path) -> None:
    journal = await open_journal(folder)
    for adapter_id in ('ad-1', 'ad-2'):
        adapter = await add(journal, make_adapter(adapter_id))
        operation = batch_operation(1, adapter_id)
        await journal.accept(operation)
        journal.note(adapter, operation, forward_result(operation))
    await journal.close()


async def test_a_changed_payload_is_never_replayed(tmp_path: Path):
    """A changed payload in the database is detected. Replaying it would silently change the adapter."""
    await _two_adapters(tmp_path)
    _damage(tmp_path, 'payload', 'operations')
    journal = await open_journal(tmp_path)
    with pytest.raises(AdapterDamaged):
        await journal.entries('ad-1', after=0)
    assert len(await journal.entries('ad-2', after=0)) == 1
    await journal.close()


@pytest.mark.parametrize('column', ['payload', 'outcome'])
async def test_unreadable_data_damages_its_adapter_only(tmp_path: Path, column: str):
    """Unreadable data raises AdapterDamaged for its adapter only."""
    await _two_adapters(tmp_path)
    _destroy(tmp_path, column, 'operations')
    journal = await open_journal(tmp_path)
    with pytest.raises(AdapterDamaged):
        await journal.entries('ad-1', after=0)
    if column == 'outcome':
        with pytest.raises(AdapterDamaged):
            await journal.record('ad-1', size=8)
    assert len(await journal.entries('ad-2', after=0)) == 1
    assert len(await journal.record('ad-2', size=8)) == 1
    await journal.close()


async def test_unreadable_record_does_not_hide_other_adapters(tmp_path: Path):
    """An unreadable record does not hide the other adapters."""
    await _two_adapters(tmp_path)
    _destroy(tmp_path, 'record', 'adapters')
    journal = await open_journal(tmp_path)
    assert [item.adapter.adapter_id for item in await journal.adapters()] == ['ad-2']
    assert await journal.damaged_adapters() == {'ad-1': 'alice'}
    with pytest.raises(AdapterDamaged):
        await journal.record('ad-1', size=8)
    await journal.close()


@pytest.mark.parametrize('damage', ['lose', 'empty'])
async def test_missing_database_with_snapshot_files_is_refused(tmp_path: Path, damage: str):
    """A missing or empty database is refused while snapshot files exist, because the service would delete them."""
    journal = await open_journal(tmp_path)
    adapter = await add(journal, make_adapter())
    await journal.add_snapshot(Snapshot(sequence_number=0, adapter=adapter, state=state_of(1)))
    await journal.close()
    database = tmp_path / 'journal.sqlite'
    if damage == 'lose':
        database.unlink()
    else:
        database.write_bytes(b'')
    for _ in range(2):
        with pytest.raises(JournalRefused):
            await open_journal(tmp_path)
    assert list((tmp_path / 'snapshots').iterdir())


async def test_a_folder_in_place_of_the_database_is_refused(tmp_path: Path):
    """A folder in place of the database is refused."""
    (tmp_path / 'journal.sqlite').mkdir()
    with pytest.raises(JournalRefused):
        await open_journal(tmp_path)


def test_damaged_adapter_is_reported_to_its_tenant_only():
    """The tenant of an adapter with a damaged record gets ADAPTER_DAMAGED; other tenants do not find the adapter."""
    directory = AdapterDirectory()
    directory.put_damaged('ad-1', 'alice')
    with pytest.raises(AdapterDamaged):
        directory.get(Caller(tenant_id='alice', scopes=frozenset({'train'})), 'ad-1')
    with pytest.raises(AdapterNotFound):
        directory.get(Caller(tenant_id='bob', scopes=frozenset({'train'})), 'ad-1')
