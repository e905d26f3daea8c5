"""Following a feed loses no row, whatever breaks."""

from datetime import UTC, datetime

import pytest

from fixtures.gateway_stores import MemoryRunStore, ScriptedFeed
from services.gateway.catalogue.follow_catalogue import LONGEST_PAUSE_SECONDS, FollowCatalogue
from services.gateway.catalogue.rules import Gone, Run, RunFilter, Seen, Synced
from services.gateway.paging import Page
from services.kit.clock import FakeClock
from services.kit.errors import InvalidField, ServiceUnreachable

START = datetime(2026, 5, 1, tzinfo=UTC)


class Stop(Exception):
    """Ends a test's following."""


def seen(run_id: str, token: str) -> Seen[Run]:
    """Return the event that a run exists."""
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
    return Seen(key=('alice', run_id), entry=run, resume_token=token)


async def follow(feed: ScriptedFeed, runs: MemoryRunStore) -> list[float]:
    """Follow until the scripts are over; return how long each pause was."""
    pauses: list[float] = []
    scripts = feed.remaining

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == scripts:
            raise Stop

    following = FollowCatalogue('runs', feed=feed, shelf=runs, clock=FakeClock(), pause=pause)
    with pytest.raises(Stop):
        await following()
    return pauses


async def activity(runs: MemoryRunStore) -> dict[str, bool]:
    """Return each run's id and whether it is active."""
    listed = await runs.list_newest('alice', Page(size=100), RunFilter())
    return {run.run_id: run.is_active for run in listed}


async def test_runs_absent_from_the_snapshot_become_inactive() -> None:
    """What was known and is not in a whole snapshot is inactive, and still there."""
    runs = MemoryRunStore()
    await runs.save(seen('old', '').entry)
    await follow(ScriptedFeed([seen('a', '1'), seen('b', '2'), Synced(resume_token='3')]), runs)
    assert await activity(runs) == {'old': False, 'a': True, 'b': True}


async def test_half_a_snapshot_marks_nothing_and_is_no_position() -> None:
    """A snapshot that breaks is begun again from nothing."""
    runs = MemoryRunStore()
    await runs.save(seen('old', '').entry)
    feed = ScriptedFeed([seen('a', '1'), ServiceUnreachable('model')], [])
    await follow(feed, runs)
    assert feed.tokens == ['', '']
    assert await activity(runs) == {'old': True, 'a': True}


async def test_broken_stream_goes_on_after_the_last_event() -> None:
    """After the snapshot, another connection asks for what came after the last event."""
    runs = MemoryRunStore()
    feed = ScriptedFeed(
        [Synced(resume_token='1'), seen('a', '2'), ServiceUnreachable('model')],
        [Gone(key=('alice', 'a'), resume_token='3')],
    )
    await follow(feed, runs)
    assert feed.tokens == ['', '2']
    assert await activity(runs) == {'a': False}


async def test_mark_of_a_resumed_stream_makes_nothing_inactive() -> None:
    """A service may say that it told all changes since the token; that is no empty snapshot."""
    runs = MemoryRunStore()
    feed = ScriptedFeed([seen('a', '1'), Synced(resume_token='2')], [Synced(resume_token='3'), seen('b', '4')])
    await follow(feed, runs)
    assert await activity(runs) == {'a': True, 'b': True}


async def test_snapshot_in_the_middle_of_a_stream_is_taken_as_one() -> None:
    """A service that lost track tells everything again, without positions; what it leaves out is gone."""
    runs = MemoryRunStore()
    snapshot = [seen('b', ''), Synced(resume_token='9')]
    await follow(ScriptedFeed([seen('a', ''), Synced(resume_token='1'), *snapshot]), runs)
    assert await activity(runs) == {'a': False, 'b': True}
    feed = ScriptedFeed([Synced(resume_token='1'), seen('c', '2')], snapshot)
    await follow(feed, runs)
    assert feed.tokens == ['', '2']
    assert await activity(runs) == {'a': False, 'b': True, 'c': False}


@pytest.mark.parametrize('error', [ServiceUnreachable('model'), InvalidField('resume_token', 'is too old')])
async def test_unheard_service_is_asked_for_a_snapshot_next(error: Exception) -> None:
    """A service that was away, or does not know the token, is asked for everything."""
    runs = MemoryRunStore()
    feed = ScriptedFeed([seen('old', '6'), Synced(resume_token='7')], [error], [Synced(resume_token='1')])
    await follow(feed, runs)
    assert feed.tokens == ['', '7', '']
    assert await activity(runs) == {'old': False}


async def test_pauses_grow_to_a_bound_and_start_over_once_heard() -> None:
    """Attempts never stop; their pauses are bounded, and short again after a success."""
    away = [ServiceUnreachable('model')]
    feed = ScriptedFeed(*[away] * 12, [Synced(resume_token='1')])
    pauses = await follow(feed, MemoryRunStore())
    assert max(pauses) <= LONGEST_PAUSE_SECONDS
    assert min(pauses[8:12]) >= LONGEST_PAUSE_SECONDS / 2
    assert pauses[-1] <= 0.2
