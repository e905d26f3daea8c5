"""Following a feed loses no row, whatever breaks."""

from datetime import UTC, datetime

import pytest

from fixtures.gateway_stores import MemoryPositionStore, MemoryRunStore, ScriptedFeed
from services.gateway.application.follow_catalogue import LONGEST_PAUSE_SECONDS, FollowCatalogue
from services.gateway.domain.catalogue import Gone, Run, Seen, Synced
from services.gateway.domain.listing import Page
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
    return Seen(entry_id=run_id, entry=run, resume_token=token)


async def follow(feed: ScriptedFeed, runs: MemoryRunStore, positions: MemoryPositionStore) -> list[float]:
    """Follow until the scripts are over; return how long each pause was."""
    pauses: list[float] = []
    scripts = feed.remaining

    async def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == scripts:
            raise Stop

    following = FollowCatalogue('runs', feed=feed, shelf=runs, positions=positions, clock=FakeClock(), pause=pause)
    with pytest.raises(Stop):
        await following()
    return pauses


async def activity(runs: MemoryRunStore) -> dict[str, bool]:
    """Return each run's id and whether it is active."""
    listed = await runs.list_newest('alice', Page(size=100), base_model=None)
    return {run.run_id: run.is_active for run in listed}


async def test_runs_absent_from_the_snapshot_become_inactive() -> None:
    """What was known and is not in a whole snapshot is inactive, and still there."""
    runs, positions = MemoryRunStore(), MemoryPositionStore()
    await runs.save(seen('old', '').entry)
    await follow(ScriptedFeed([seen('a', '1'), seen('b', '2'), Synced(resume_token='3')]), runs, positions)
    assert await activity(runs) == {'old': False, 'a': True, 'b': True}
    assert await positions.load('runs') == '3'


async def test_half_a_snapshot_marks_nothing_and_is_no_position() -> None:
    """A snapshot that breaks is begun again from nothing."""
    runs, positions = MemoryRunStore(), MemoryPositionStore()
    await runs.save(seen('old', '').entry)
    feed = ScriptedFeed([seen('a', '1'), ServiceUnreachable('model')], [Synced(resume_token='9')])
    first = ScriptedFeed([seen('a', '1'), ServiceUnreachable('model')])
    await follow(first, runs, positions)
    assert await activity(runs) == {'old': True, 'a': True}
    assert await positions.load('runs') == ''
    await follow(feed, runs, positions)
    assert feed.tokens == ['', '']


async def test_broken_stream_goes_on_after_the_last_event() -> None:
    """After the snapshot, another connection asks for what came after the last event."""
    runs, positions = MemoryRunStore(), MemoryPositionStore()
    feed = ScriptedFeed(
        [Synced(resume_token='1'), seen('a', '2'), ServiceUnreachable('model')],
        [Gone(entry_id='a', resume_token='3')],
    )
    await follow(feed, runs, positions)
    assert feed.tokens == ['', '2']
    assert await activity(runs) == {'a': False}


async def test_another_process_begins_where_the_last_one_was() -> None:
    """The position outlives the follower."""
    runs, positions = MemoryRunStore(), MemoryPositionStore()
    await positions.save('runs', '7')
    feed = ScriptedFeed([seen('a', '8')])
    await follow(feed, runs, positions)
    assert feed.tokens == ['7']
    assert await activity(runs) == {'a': True}


@pytest.mark.parametrize('error', [ServiceUnreachable('model'), InvalidField('resume_token', 'is too old')])
async def test_unheard_service_is_asked_for_a_snapshot_next(error: Exception) -> None:
    """A service that was away, or does not know the token, is asked for everything."""
    runs, positions = MemoryRunStore(), MemoryPositionStore()
    await positions.save('runs', '7')
    await runs.save(seen('old', '').entry)
    feed = ScriptedFeed([error], [Synced(resume_token='1')])
    await follow(feed, runs, positions)
    assert feed.tokens == ['7', '']
    assert await activity(runs) == {'old': False}


async def test_pauses_grow_to_a_bound_and_start_over_once_heard() -> None:
    """Attempts never stop; their pauses are bounded, and short again after a success."""
    away = [ServiceUnreachable('model')]
    feed = ScriptedFeed(*[away] * 12, [Synced(resume_token='1')])
    pauses = await follow(feed, MemoryRunStore(), MemoryPositionStore())
    assert max(pauses) <= LONGEST_PAUSE_SECONDS
    assert min(pauses[8:12]) >= LONGEST_PAUSE_SECONDS / 2
    assert pauses[-1] <= 0.2
