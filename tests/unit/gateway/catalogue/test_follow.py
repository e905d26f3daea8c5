"""Tests of `FeedFollower`: snapshots, changes, broken streams and pauses."""

from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from fixtures.gateway_database import copied_database
from twinkle_services.gateway.catalogue.follow import LONGEST_PAUSE_SECONDS, FeedFollower
from twinkle_services.gateway.catalogue.rules import (
    CatalogueEvent,
    EntryChanged,
    EntryDamaged,
    EntryDeleted,
    Run,
    RunFilter,
    SnapshotComplete,
)
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.paging import Page
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import InvalidField, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)


class ScriptedFeed:
    """An event feed whose streams each yield the events of one script."""

    def __init__(self, *scripts: Sequence[CatalogueEvent[Any] | Exception]) -> None:
        """Use the scripts in order; an exception in a script is raised at its position."""
        self._scripts = list(scripts)
        self.tokens: list[str] = []

    @property
    def remaining(self) -> int:
        """Number of scripts that have not been used."""
        return len(self._scripts)

    async def follow(self, resume_token: str) -> AsyncIterator[CatalogueEvent[Any]]:
        """Record the token and yield the events of the next script."""
        self.tokens.append(resume_token)
        for event in self._scripts.pop(0):
            if isinstance(event, Exception):
                raise event
            yield event


@pytest.fixture
def runs(database: Database) -> SqlRunStore:
    """Store without runs."""
    return SqlRunStore(database)


class Stop(Exception):
    """Raised by `pause` to stop the follower at the end of a test."""


def changed(run_id: str, token: str) -> EntryChanged[Run]:
    """Return the event that reports an active run."""
    run = Run(
        run_id=run_id,
        tenant_id='alice',
        base_model='tiny',
        lora_rank=8,
        step_count=0,
        version=0,
        is_active=True,
        create_time=START,
        update_time=START,
    )
    return EntryChanged(key=('alice', run_id), entry=run, resume_token=token)


class FailingRunStore(SqlRunStore):
    """Fails when the first run is saved."""

    is_failing = True

    async def save(self, entry: Run) -> None:
        """Save the run, or fail."""
        if self.is_failing:
            self.is_failing = False
            raise ServiceUnreachable('database')
        await super().save(entry)


async def follow(feed: ScriptedFeed, *stores: SqlRunStore) -> list[float]:
    """Follow the feed until all scripts have run; return the length of each pause in seconds."""
    pauses: list[float] = []
    scripts = feed.remaining

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == scripts:
            raise Stop

    copies = [(lambda run: run, store) for store in stores]
    follower = FeedFollower('runs', feed=feed.follow, copies=copies, clock=FakeClock(), pause=pause)
    with pytest.raises(Stop):
        await follower.run()
    return pauses


async def activity(runs: SqlRunStore) -> dict[str, bool]:
    """Return whether each run of alice is active, by run id."""
    listed = (await runs.list_newest('alice', Page(size=100), RunFilter())).items
    return {run.run_id: run.is_active for run in listed}


async def test_runs_absent_from_the_snapshot_become_inactive(runs: SqlRunStore) -> None:
    """A stored run that is absent from a complete snapshot becomes inactive but is not removed."""
    await runs.save(changed('old', '').entry)
    await follow(ScriptedFeed([changed('a', '1'), changed('b', '2'), SnapshotComplete(resume_token='3')]), runs)
    assert await activity(runs) == {'old': False, 'a': True, 'b': True}


async def test_damaged_run_stays_active(runs: SqlRunStore) -> None:
    """A run with a damaged record is part of the snapshot, so the run stays active with its earlier content."""
    await runs.save(changed('old', '').entry)
    await follow(ScriptedFeed([EntryDamaged(key=('alice', 'old')), SnapshotComplete(resume_token='3')]), runs)
    assert await activity(runs) == {'old': True}


async def test_incomplete_snapshot_is_restarted(runs: SqlRunStore) -> None:
    """A stream that breaks during its snapshot makes no run inactive, and the next stream starts from the beginning."""
    await runs.save(changed('old', '').entry)
    feed = ScriptedFeed([changed('a', '1'), ServiceUnreachable('model')], [])
    await follow(feed, runs)
    assert feed.tokens == ['', '']
    assert await activity(runs) == {'old': True, 'a': True}


async def test_broken_stream_resumes_after_the_last_event(runs: SqlRunStore) -> None:
    """The stream after a complete snapshot resumes at the token of the last event."""
    feed = ScriptedFeed(
        [SnapshotComplete(resume_token='1'), changed('a', '2'), ServiceUnreachable('model')],
        [EntryDeleted(key=('alice', 'a'), resume_token='3')],
    )
    await follow(feed, runs)
    assert feed.tokens == ['', '2']
    assert await activity(runs) == {'a': False}


async def test_event_is_repeated_after_a_store_failed(prepared_database: Path, tmp_path: Path) -> None:
    """If one store fails, the next stream begins with the same event, and all stores receive every event."""
    feed = ScriptedFeed(
        [SnapshotComplete(resume_token='1'), changed('a', '2')],
        [changed('a', '2'), changed('b', '3'), EntryDeleted(key=('alice', 'a'), resume_token='4')],
    )
    async with AsyncExitStack() as stack:
        stores: list[SqlRunStore] = []
        for number, kind in enumerate((SqlRunStore, FailingRunStore, SqlRunStore)):
            (folder := tmp_path / str(number)).mkdir()
            stores.append(kind(await stack.enter_async_context(copied_database(prepared_database, folder))))
        await follow(feed, *stores)
        assert feed.tokens == ['', '1']
        assert [await activity(runs) for runs in stores] == [{'a': False, 'b': True}] * 3


async def test_end_of_a_resumed_snapshot_deactivates_nothing(runs: SqlRunStore) -> None:
    """A `SnapshotComplete` event in a resumed stream is not treated as an empty snapshot."""
    feed = ScriptedFeed(
        [changed('a', '1'), SnapshotComplete(resume_token='2')], [SnapshotComplete(resume_token='3'), changed('b', '4')]
    )
    await follow(feed, runs)
    assert await activity(runs) == {'a': True, 'b': True}


async def test_second_snapshot_within_a_stream_is_recognized(runs: SqlRunStore) -> None:
    """Events without a token start a new snapshot inside a stream; runs absent from this snapshot become inactive."""
    snapshot = [changed('b', ''), SnapshotComplete(resume_token='9')]
    await follow(ScriptedFeed([changed('a', ''), SnapshotComplete(resume_token='1'), *snapshot]), runs)
    assert await activity(runs) == {'a': False, 'b': True}
    feed = ScriptedFeed([SnapshotComplete(resume_token='1'), changed('c', '2')], snapshot)
    await follow(feed, runs)
    assert feed.tokens == ['', '2']
    assert await activity(runs) == {'a': False, 'b': True, 'c': False}


@pytest.mark.parametrize('error', [ServiceUnreachable('model'), InvalidField('resume_token', 'is too old')])
async def test_stream_without_events_is_followed_by_a_snapshot(runs: SqlRunStore, error: Exception) -> None:
    """If a stream fails before its first event, the follower requests a snapshot next."""
    feed = ScriptedFeed(
        [changed('old', '6'), SnapshotComplete(resume_token='7')], [error], [SnapshotComplete(resume_token='1')]
    )
    await follow(feed, runs)
    assert feed.tokens == ['', '7', '']
    assert await activity(runs) == {'old': False}


async def test_pauses_are_bounded_and_reset_after_a_success(runs: SqlRunStore) -> None:
    """Pauses between failed attempts grow to a maximum, and are short again after a success."""
    unreachable = [ServiceUnreachable('model')]
    feed = ScriptedFeed(*[unreachable] * 12, [SnapshotComplete(resume_token='1')])
    pauses = await follow(feed, runs)
    assert max(pauses) <= LONGEST_PAUSE_SECONDS
    assert min(pauses[8:12]) >= LONGEST_PAUSE_SECONDS / 2
    assert pauses[-1] <= 0.2
