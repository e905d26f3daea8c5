"""Owners can delete adapters whose rows in the journal are damaged."""

import sqlite3
from pathlib import Path

import pytest

from fixtures.crashing import ALICE, StrictStore, start
from fixtures.journals import add, batch_operation, forward_result, make_adapter, open_journal, state_of
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.model.domain.journal import Snapshot

DAMAGES = {
    'record': "UPDATE adapters SET record = x'ff' WHERE key = 1",
    'snapshot record': "UPDATE snapshots SET record = x'ff' WHERE adapter = 1",
    'snapshot of the other adapter': 'UPDATE snapshots SET file = (SELECT file FROM snapshots WHERE adapter = 2)',
    'file name that is no text': "UPDATE snapshots SET file = CAST(x'ff' AS TEXT) WHERE adapter = 1",
    'operation': "UPDATE operations SET digest = CAST(x'ff' AS TEXT) WHERE adapter = 1",
    'lost operation': 'DELETE FROM operations WHERE adapter = 1',
    'lost seal': "DELETE FROM row_seals WHERE name = 'operations' AND key = '1,1'",
    'seal of a row that does not exist': "UPDATE row_seals SET key = '1,9' WHERE name = 'operations' AND key = '1,1'",
}
"""SQL statements that damage the first adapter: its rows without their seals, or only the seals."""


async def _two_adapters(folder: Path) -> None:
    journal = await open_journal(folder)
    for seed, adapter_id in enumerate(('ad-1', 'ad-2')):
        adapter = await add(journal, make_adapter(adapter_id))
        await journal.add_snapshot(Snapshot(sequence_number=0, adapter=adapter, state=state_of(seed)))
        operation = batch_operation(1, adapter_id)
        await journal.accept(operation)
        journal.note(adapter, operation, forward_result(operation))
    await journal.close()


def _damage(folder: Path, statement: str) -> None:
    with sqlite3.connect(folder / 'journal.sqlite') as database:
        for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'trigger'").fetchall():
            definition = database.execute('SELECT sql FROM sqlite_master WHERE name = ?', (name,)).fetchone()[0]
            database.execute(f'DROP TRIGGER "{name}"')
            database.execute('CREATE TEMP TABLE IF NOT EXISTS definitions (sql TEXT)')
            database.execute('INSERT INTO definitions VALUES (?)', (definition,))
        database.execute(statement)
        for (definition,) in database.execute('SELECT sql FROM definitions').fetchall():
            database.execute(definition)
    database.close()


@pytest.mark.parametrize('damage', DAMAGES)
async def test_owner_deletes_a_damaged_adapter(tmp_path: Path, damage: str) -> None:
    """The owner deletes an adapter with damaged rows; other tenants cannot delete it, and other adapters are kept."""
    await _two_adapters(tmp_path)
    _damage(tmp_path, DAMAGES[damage])
    journal = await open_journal(tmp_path)
    service = await start(journal, StrictStore())
    bob = Caller(tenant_id='bob', is_internal=True)
    with pytest.raises(AdapterNotFound):
        await service.verbs.delete_adapter(bob, 'ad-1')
    await service.verbs.delete_adapter(ALICE, 'ad-1')
    with pytest.raises(AdapterNotFound):
        await service.verbs.delete_adapter(ALICE, 'ad-1')
    await journal.close()
    journal = await open_journal(tmp_path)
    assert await journal.damaged_adapters() == {}
    assert [item.adapter.adapter_id for item in await journal.adapters()] == ['ad-2']
    snapshot = await journal.snapshot_before('ad-2')
    assert snapshot.state is not None
    assert len(await journal.entries('ad-2', after=0)) == 1
    assert len(list((tmp_path / 'snapshots').iterdir())) == 1
    await journal.close()
