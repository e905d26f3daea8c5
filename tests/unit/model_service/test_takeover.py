"""Takeover of an ended trainer's journal: complete, exactly once after any crash, and never from a running trainer."""

import asyncio
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from fixtures.journals import add, batch_operation, creation_of, forward_result, make_adapter, open_journal, state_of
from fixtures.tiers import mostly_slow
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.failpoints import TAKEOVER_FAILPOINTS, VARIABLE
from twinkle_services.model.backends.journal.environment import log_environment_changes
from twinkle_services.model.backends.journal.schema import DATABASE, JournalRefused
from twinkle_services.model.backends.journal.sqlite_journal import SqliteJournal
from twinkle_services.model.domain.adapter import Adapter, ExpiredAdapter
from twinkle_services.model.domain.errors import TakeoverRefused
from twinkle_services.model.domain.journal import Snapshot

LARGE = 20_000
"""Number of tokens of a batch whose payload is stored in a file."""
_TESTS = Path(__file__).parents[2]


async def _fill(folder: Path) -> Adapter:
    """Write a journal with an expired adapter and a trained adapter; return the trained adapter."""
    journal = await open_journal(folder)
    adapter = await add(journal, make_adapter(has_lease=True), state_of(1))
    first, second = batch_operation(1, length=LARGE), batch_operation(2, length=LARGE, seed=1)
    await journal.accept(first)
    trained = replace(adapter, sequence_number=1)
    journal.note(trained, first, forward_result(first))
    await journal.add_snapshot(Snapshot(sequence_number=1, adapter=trained, state=state_of(2)))
    await journal.accept(second)
    await add(journal, make_adapter('ad-old'))
    expired = ExpiredAdapter(adapter_id='ad-old', tenant_id='alice', checkpoint_path='twinkle://ad-old/weights/w')
    await journal.remove_adapter('ad-old', expired=expired)
    await journal.close()
    return trained


async def _open(folder: Path, *, peer: Path) -> SqliteJournal:
    journal = await open_journal(folder)
    journal.peers = {'ended': peer}
    return journal


async def _check_moved(journal: SqliteJournal, trained: Adapter) -> None:
    """Check that a journal has all content that `_fill` wrote."""
    adapters = {item.adapter.adapter_id: item for item in await journal.adapters()}
    assert adapters['ad-1'].adapter == replace(trained, has_lease=False)
    assert not adapters['ad-1'].is_settled
    snapshot = await journal.snapshot_before('ad-1')
    assert (snapshot.sequence_number, snapshot.state) == (1, replace(state_of(2), step_count=0))
    (entry,) = await journal.entries('ad-1', after=1)
    second = batch_operation(2, length=LARGE, seed=1)
    assert (entry.operation.fingerprint, entry.operation.payload) == (second.fingerprint, second.payload)
    assert entry.outcome is None
    assert [item.sequence_number for item in await journal.record('ad-1', size=9)] == [1, 2]
    assert await journal.creation_of('ad-1') == creation_of(trained, 'ad-1')
    assert [item.adapter_id for item in await journal.expired_adapters()] == ['ad-old']


async def test_everything_is_moved_and_both_journals_stay_usable(tmp_path: Path) -> None:
    """Adapters are moved completely, do not return after a restart, and their ids remain in use in both journals.

    Until the takeover is completed, a repeated call returns them again, because the caller may not have registered
    them.
    """
    trained = await _fill(tmp_path / 'a')
    journal = await _open(tmp_path / 'b', peer=tmp_path / 'a')
    await add(journal, make_adapter('ad-2'))
    (own,) = journal.ids
    assert [item.adapter.adapter_id for item in await journal.take_over('ended')] == ['ad-1']
    await _check_moved(journal, trained)
    assert [item.adapter.adapter_id for item in await journal.take_over('ended')] == ['ad-1']
    assert journal.ids == (own,)
    await journal.complete_take_over()
    assert await journal.take_over('ended') == []
    await journal.complete_take_over()
    ids = journal.ids
    await journal.close()
    journal = await open_journal(tmp_path / 'b')
    await _check_moved(journal, trained)
    assert {item.adapter.adapter_id for item in await journal.adapters()} == {'ad-1', 'ad-2'}
    assert (journal.ids[0], set(journal.ids)) == (own, set(ids))
    ended = await open_journal(tmp_path / 'a')
    assert await ended.adapters() == []
    assert await ended.creation_of('ad-1') == creation_of(trained, 'ad-1')
    assert not set(ended.ids) & set(ids)
    await ended.close()
    await journal.close()


async def test_runs_move_on_when_their_new_trainer_ends(tmp_path: Path) -> None:
    """A third trainer takes over the runs of two trainers; then the first trainer takes them back."""
    trained = await _fill(tmp_path / 'a')
    for target, source in (('b', 'a'), ('c', 'b'), ('a', 'c')):
        journal = await _open(tmp_path / target, peer=tmp_path / source)
        assert len(await journal.take_over('ended')) == 1
        await _check_moved(journal, trained)
        await journal.close()


@pytest.mark.parametrize('failpoint', mostly_slow(TAKEOVER_FAILPOINTS))
async def test_takeover_that_was_killed_is_completed_once(tmp_path: Path, failpoint: str) -> None:
    """Only the same trainer can complete a killed takeover; only then can the ended trainer start again."""
    trained = await _fill(tmp_path / 'a')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, '-m', 'fixtures.taking_over', tmp_path / 'b', tmp_path / 'a'),
        env={**os.environ, VARIABLE: failpoint, 'PYTHONPATH': os.pathsep.join([str(_TESTS), *sys.path])},
    )
    assert await process.wait() == -signal.SIGKILL
    if failpoint != 'takeover.finished':
        with pytest.raises(JournalRefused):
            await open_journal(tmp_path / 'a')
        third = await _open(tmp_path / 'c', peer=tmp_path / 'a')
        with pytest.raises(TakeoverRefused):
            await third.take_over('ended')
        await third.close()
    journal = await _open(tmp_path / 'b', peer=tmp_path / 'a')
    await journal.take_over('ended')
    await _check_moved(journal, trained)
    ended = await open_journal(tmp_path / 'a')
    assert await ended.adapters() == []
    await ended.close()
    await journal.close()


async def test_interrupted_takeover_is_completed_by_the_successor(tmp_path: Path) -> None:
    """If the new trainer ends during a takeover, the trainer that takes over from it completes the takeover."""
    trained = await _fill(tmp_path / 'a')
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, '-m', 'fixtures.taking_over', tmp_path / 'b', tmp_path / 'a'),
        env={**os.environ, VARIABLE: 'takeover.inserted', 'PYTHONPATH': os.pathsep.join([str(_TESTS), *sys.path])},
    )
    assert await process.wait() == -signal.SIGKILL
    journal = await open_journal(tmp_path / 'c')
    journal.peers = {'a': tmp_path / 'a', 'b': tmp_path / 'b'}
    with pytest.raises(TakeoverRefused):
        await journal.take_over('a')
    assert len(await journal.take_over('b')) == 1
    await journal.complete_take_over()
    assert await journal.take_over('a') == []
    await _check_moved(journal, trained)
    await journal.close()


async def test_running_trainer_keeps_its_runs(tmp_path: Path) -> None:
    """A takeover is refused, without changes, while the trainer's process has the journal open."""
    await _fill(tmp_path / 'a')
    running = await open_journal(tmp_path / 'a')
    journal = await _open(tmp_path / 'b', peer=tmp_path / 'a')
    with pytest.raises(TakeoverRefused):
        await journal.take_over('ended')
    assert len(await running.adapters()) == 1
    assert await journal.adapters() == []
    await running.close()
    await journal.close()


async def test_unusable_journals_are_refused_before_any_change(tmp_path: Path) -> None:
    """Unknown names, missing journals, other settings or engines and equal ids are refused."""
    await _fill(tmp_path / 'a')
    journal = await _open(tmp_path / 'b', peer=tmp_path / 'a')
    journal.peers = {**journal.peers, 'missing': tmp_path / 'missing'}
    with pytest.raises(InvalidField):
        await journal.take_over('unknown')
    with pytest.raises(TakeoverRefused):
        await journal.take_over('missing')
    assert not (tmp_path / 'missing').exists()
    await add(journal, make_adapter('ad-1'))
    with pytest.raises(TakeoverRefused, match='same id'):
        await journal.take_over('ended')
    await journal.remove_adapter('ad-1')
    for name, count in (('a', 1), ('b', 2)):
        log_environment_changes(tmp_path / name, {'thread_count': count})
    with pytest.raises(TakeoverRefused, match='thread_count'):
        await journal.take_over('ended')
    await journal.close()
    journal = await open_journal(tmp_path / 'd', engine='other')
    journal.peers = {'ended': tmp_path / 'a'}
    with pytest.raises(TakeoverRefused):
        await journal.take_over('ended')
    await journal.close()
    assert (tmp_path / 'a' / DATABASE).is_file()
    ended = await open_journal(tmp_path / 'a')
    assert len(await ended.adapters()) == 1
    await ended.close()
