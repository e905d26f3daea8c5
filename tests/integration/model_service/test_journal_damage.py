"""A journal with a damaged file refuses to open, reports the damaged adapters, or returns everything recorded."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from blake3 import blake3

from fixtures.damage import apply, damages_below
from fixtures.journals import add, batch_operation, forward_result, make_adapter, open_journal, state_of
from twinkle_services.kit.errors import AdapterNotFound
from twinkle_services.model.backends.journal.schema import JournalRefused
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.domain.errors import AdapterDamaged
from twinkle_services.model.domain.journal import Snapshot

LARGE = 20_000
"""Number of tokens of a batch whose payload is stored in a file."""
NAMES = ('ad-1', 'ad-2')


async def _killed(folder: Path) -> Path:
    """Return the folder of a journal whose process was killed, with two adapters, snapshots and later operations."""
    live = folder / 'live'
    journal = await open_journal(live)
    for name in NAMES:
        adapter = await add(journal, make_adapter(name))
        for number in (1, 2, 3, 4):
            operation = batch_operation(number, name, length=LARGE if number == 3 else 12, seed=number)
            await journal.accept(operation)
            after = replace(adapter, sequence_number=number)
            if number < 4:
                journal.note(after, operation, forward_result(operation))
            if number == 2:
                await journal.add_snapshot(Snapshot(sequence_number=2, adapter=after, state=state_of(number)))
    killed = folder / 'killed'
    await journal.record('ad-1', size=1)
    shutil.copytree(live, killed)
    await journal.close()
    return killed


async def _content(journal: SqliteJournal, name: str) -> object:
    """Return everything that the restore of an adapter reads, or 'damaged' if the adapter is reported as damaged."""
    if name in await journal.damaged_adapters():
        return 'damaged'
    try:
        known = {item.adapter.adapter_id: item for item in await journal.adapters()}
        snapshot = await journal.snapshot_before(name)
        entries = await journal.entries(name, after=snapshot.sequence_number)
        values = [(blake3(entry.operation.payload).hexdigest(), repr(entry.outcome)) for entry in entries]
        record = [repr(entry) for entry in await journal.record(name, size=64)]
        steps = await journal.applied_steps(name)
    except AdapterDamaged:
        return 'damaged'
    state = None if snapshot.state is None else [bytes(tensor.data) for tensor in snapshot.state.adapter.values()]
    # From an older snapshot, replaying more operations gives the same adapter.
    return repr((known[name], steps, record)), state, values, snapshot.sequence_number


async def _outcome(folder: Path, undamaged: dict[str, object]) -> str:
    try:
        journal = await open_journal(folder)
    except JournalRefused as refusal:
        return 'refused' if 'journal.sqlite' in str(refusal) else f'not named: {refusal}'
    try:
        found = {name: await _content(journal, name) for name in NAMES}
    except AdapterNotFound as error:
        raise AssertionError(f'an adapter is missing and not reported as damaged: {error}') from error
    finally:
        await journal.close()
    for name in NAMES:
        is_older = found[name] != 'damaged' and found[name][3] < undamaged[name][3]
        assert found[name] in ('damaged', undamaged[name]) or is_older, name
    return 'named' if 'damaged' in found.values() else 'equal'


@pytest.mark.slow
async def test_damage_to_any_file_of_a_journal_is_reported_or_has_no_effect(tmp_path: Path):
    """If any file is damaged, the journal refuses to open, reports the adapter, or returns the recorded content."""
    killed = await _killed(tmp_path)
    work = tmp_path / 'work'
    shutil.copytree(killed, work)
    journal = await open_journal(work)
    undamaged = {name: await _content(journal, name) for name in NAMES}
    await journal.close()
    cold = tmp_path / 'cold'
    shutil.copytree(work, cold)
    for source in (killed, cold):
        for path, damage, content in damages_below(source, flips=3):
            shutil.rmtree(work)
            shutil.copytree(source, work)
            apply(work / path, content)
            try:
                assert await _outcome(work, undamaged) in ('refused', 'named', 'equal')
            except Exception as error:
                raise AssertionError(f'{source.name}/{path}: {damage}') from error


async def test_a_journal_that_lost_transactions_is_refused_until_the_loss_is_accepted(tmp_path: Path):
    """A journal whose damaged log has lost transactions opens only if the loss is accepted."""
    killed = await _killed(tmp_path)
    log = killed / 'journal.sqlite-wal'
    content = bytearray(log.read_bytes())
    # The damage is in the first frame, so SQLite drops all later frames too.
    content[1000] ^= 1
    log.write_bytes(content)
    with pytest.raises(JournalRefused, match=r'lost its last \d+ transactions: journal.sqlite-wal .* accept_data_loss'):
        await open_journal(killed)
    journal = await open_journal(killed, is_loss_accepted=True)
    kept = [item.adapter.adapter_id for item in await journal.adapters()]
    numbers = [entry.sequence_number for name in kept for entry in await journal.record(name, size=64)]
    assert len(numbers) < 8
    await journal.close()
    await (await open_journal(killed)).close()
