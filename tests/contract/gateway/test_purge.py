"""Contract tests of the removal of old rows, on SQLite and PostgreSQL."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import datetime, timedelta

import pytest

from fixtures import gateway_entries
from fixtures.gateway_entries import CHECKPOINT, SESSION
from twinkle_services.gateway.catalogue.follow import KEPT_FOR, Purge
from twinkle_services.gateway.catalogue.rules import CheckpointFilter, RunFilter
from twinkle_services.gateway.catalogue.sql import SqlBrowser, SqlCheckpointStore, SqlEndedRows, SqlRunStore
from twinkle_services.gateway.keys.rules import Tenant
from twinkle_services.gateway.keys.sql import SqlTenantStore
from twinkle_services.gateway.paging import Page, Slice
from twinkle_services.gateway.quotas.rules import Reading, UsageBatch, Work
from twinkle_services.gateway.quotas.sql import SqlEndedUsage, SqlUsageStore
from twinkle_services.gateway.sampling.rules import SamplingHandle
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.sessions.rules import FinishReason, SessionState
from twinkle_services.gateway.sessions.sql import SqlSessionStore
from twinkle_services.gateway.store.base import DELETED_AT_ONCE
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.errors import ServiceUnreachable

START = gateway_entries.START.replace(minute=0, second=0, microsecond=0)
"""Start of an hour, because usage is stored by the hour."""
LATER = START + timedelta(days=1)
RUN = replace(gateway_entries.RUN, session_id='ses-1')
HANDLE = SamplingHandle(
    handle_id='h-1', tenant_id='alice', session_id='ses-1', base_model='tiny', adapter_id='ad-1', create_time=START
)
PERIODS = [(None, None), (START, START + timedelta(hours=1)), (START + timedelta(hours=1), LATER), (LATER, None)]
"""Periods whose totals a purge must not change."""


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Database]:
    """Database with the tenant alice."""
    database = await Database.open(database_url)
    await SqlTenantStore(database).add_if_absent(Tenant(tenant_id='alice', display_name='', create_time=START))
    yield database
    await database.close()


async def _add_session(database: Database, session_id: str, **changes: object) -> None:
    session = replace(SESSION, session_id=session_id, request_id=session_id, **changes)
    await SqlSessionStore(database).add_if_absent(session)


async def _purge(database: Database, before: datetime = LATER) -> int:
    return await SqlEndedRows(database).purge(before=before)


async def test_deleted_checkpoints_and_runs_are_removed_later(database):
    """Old deleted checkpoints and runs are removed; newer or existing ones are kept."""
    runs, checkpoints = SqlRunStore(database), SqlCheckpointStore(database)
    for name, moment in (('old', START), ('new', LATER), ('present', None)):
        await runs.save(replace(RUN, run_id=name))
        await checkpoints.save(replace(CHECKPOINT, checkpoint_id=f'{name}/weights/a', run_id=name))
        if moment is not None:
            await runs.mark_deleted(('alice', name), moment=moment)
            await checkpoints.mark_deleted(('alice', f'{name}/weights/a'), moment=moment)
    assert await _purge(database) == 2
    assert await _purge(database) == 0
    listed = (await runs.list_newest('alice', Page(size=9), RunFilter())).items
    assert {run.run_id for run in listed} == {'new', 'present'}
    assert await _purge(database, LATER + timedelta(seconds=1)) == 2


async def test_stored_bytes_of_existing_checkpoints_stay(database):
    """A deleted run and an ended session are kept while a checkpoint exists, so that the stored bytes stay the same."""
    await _add_session(database, 'ses-1', state=SessionState.EXPIRED, is_settled=True)
    await SqlRunStore(database).save(RUN)
    await SqlRunStore(database).mark_deleted(('alice', 'ad-1'), moment=START)
    checkpoints = SqlCheckpointStore(database)
    await checkpoints.save(CHECKPOINT)
    stored = (1, CHECKPOINT.size_bytes)
    for _ in range(2):
        assert await SqlBrowser(database).stored('alice') == stored
        assert await SqlBrowser(database).stored('alice', session_id='ses-1') == stored
        assert await SqlUsageStore(database).stored_bytes('alice') == CHECKPOINT.size_bytes
        assert await _purge(database) == 0
    await checkpoints.mark_deleted(('alice', CHECKPOINT.checkpoint_id), moment=START)
    assert await _purge(database) == 3
    assert await SqlSessionStore(database).get('alice', 'ses-1') is None
    await checkpoints.save(CHECKPOINT)
    assert (await checkpoints.list_newest('alice', Page(size=9), CheckpointFilter())).items == [CHECKPOINT]


async def test_only_settled_sessions_are_removed(database):
    """Old ended sessions and their old handles are removed once the sessions are settled; all others are kept."""
    ended = {'state': SessionState.FINISHED, 'finish_reason': FinishReason.SUCCESS}
    await _add_session(database, 'settled', **ended, is_settled=True)
    await _add_session(database, 'unsettled', **ended)
    await _add_session(database, 'silent', state=SessionState.ACTIVE)
    await _add_session(database, 'recent', **ended, is_settled=True, heartbeat_time=LATER)
    handles, names = SqlHandleStore(database), ('settled', 'unsettled', 'silent', 'recent')
    for name in names:
        await handles.add_if_absent(replace(HANDLE, handle_id=f'h-{name}', session_id=name))
    await handles.add_if_absent(replace(HANDLE, handle_id='h-new', session_id='settled', create_time=LATER))
    assert await handles.purge(before=LATER) == 0
    assert await _purge(database) == 1
    assert await handles.purge(before=LATER) == 1
    found = [await SqlSessionStore(database).get('alice', name) for name in names]
    assert [session is not None for session in found] == [False, True, True, True]
    remaining = [name for name in (*names, 'new') if await handles.get('alice', f'h-{name}') is not None]
    assert remaining == ['unsettled', 'silent', 'recent', 'new']


async def test_more_rows_than_one_transaction_deletes_are_removed(database):
    """All old rows are removed, even if one transaction does not delete them all."""
    count = DELETED_AT_ONCE + 1
    for number in range(count):
        await _add_session(database, f'ses-{number}', state=SessionState.EXPIRED, is_settled=True)
    assert await _purge(database) == count
    found = await SqlBrowser(database).sessions('alice', Slice(offset=0, limit=9))
    assert (list(found.items), found.total_count) == ([], 0)


async def test_usage_of_removed_runs_is_merged(database):
    """Old usage of runs that are not stored is merged by hour, and the totals of each period stay the same."""
    usage = SqlUsageStore(database)
    works = [Work(trained_token_count=n, operation_count=1, prompt_count=n) for n in (1, 2, 4)]
    await SqlRunStore(database).save(replace(RUN, run_id='kept'))
    named = zip(('gone', 'other', 'kept'), works, strict=True)
    await usage.record(_batch(1, START, *(('alice', name, work) for name, work in named)))
    await usage.record(_batch(2, START + timedelta(hours=1), ('alice', 'gone', works[0]), ('alice', '', works[0])))
    await usage.record(_batch(3, LATER, ('alice', 'gone', works[2])))
    before = [await _total(usage, *period) for period in PERIODS]
    assert await SqlEndedUsage(database).purge(before=LATER) == 3
    assert [await _total(usage, *period) for period in PERIODS] == before
    by_run = {item.run_id: item.work.trained_token_count for item in await usage.list_of('alice', begin=None, end=None)}
    assert by_run == {'': 5, 'gone': 4, 'kept': 4}
    assert await SqlEndedUsage(database).purge(before=LATER) == 0


async def test_meter_is_removed_with_its_run(database):
    """The meter of a run is kept while the run or recent usage is stored, so that no reading counts twice."""
    usage, runs = SqlUsageStore(database), SqlRunStore(database)
    await runs.save(RUN)
    reading = Reading(tenant_id='alice', run_id='ad-1', trained_token_count=7, operation_count=2)
    total = Work(trained_token_count=7, operation_count=2)
    await usage.record(replace(_batch(1, START), readings=(reading,)))
    assert await SqlEndedUsage(database).purge(before=LATER) == 0
    await usage.record(replace(_batch(2, START), readings=(reading,)))
    assert await _total(usage, None, None) == total
    await runs.mark_deleted(('alice', 'ad-1'), moment=START)
    assert await _purge(database) == 1
    assert await SqlEndedUsage(database).purge(before=START) == 0
    assert await SqlEndedUsage(database).purge(before=LATER) == 2
    assert await _total(usage, None, None) == total


async def test_concurrent_purges_count_usage_once(database, database_url):
    """Two gateways that purge at the same time leave the totals unchanged."""
    usage, other = SqlUsageStore(database), await Database.open(database_url)
    works = [('alice', f'ad-{number}', Work(operation_count=1)) for number in range(50)]
    await usage.record(_batch(1, START, *works))
    counts = await asyncio.gather(*(SqlEndedUsage(item).purge(before=LATER) for item in (database, other)))
    await other.close()
    assert sum(counts) == 50
    assert await _total(usage, None, None) == Work(operation_count=50)


async def test_purges_are_repeated_daily(database):
    """Rows are purged at the start and once a day, even after a failure."""
    clock, pauses = FakeClock(START + KEPT_FOR), []
    await _add_session(database, 'ses-1', state=SessionState.EXPIRED, is_settled=True)

    async def pause(seconds: float) -> None:
        clock.advance(timedelta(seconds=seconds))
        pauses.append(seconds)
        if len(pauses) == 3:
            raise asyncio.CancelledError

    store = FailingRows(SqlEndedRows(database))
    with pytest.raises(asyncio.CancelledError):
        await Purge([store], clock=clock).run(pause=pause)
    assert pauses == [86400.0] * 3
    assert store.counts == [0, 1]
    assert await SqlSessionStore(database).get('alice', 'ses-1') is None


class FailingRows:
    """Rows whose second purge fails."""

    def __init__(self, rows: SqlEndedRows) -> None:
        self._rows = rows
        self._calls = 0
        self.counts: list[int] = []

    async def purge(self, *, before: datetime) -> int:
        """Remove the rows and return their number, or fail."""
        self._calls += 1
        if self._calls == 2:
            raise ServiceUnreachable('database')
        self.counts.append(await self._rows.purge(before=before))
        return self.counts[-1]


def _batch(number: int, moment: datetime, *works: tuple[str, str, Work]) -> UsageBatch:
    return UsageBatch(writer_id='w1', number=number, moment=moment, works=works, readings=())


async def _total(usage: SqlUsageStore, begin: datetime | None, end: datetime | None) -> Work:
    return sum((item.work for item in await usage.list_of('alice', begin=begin, end=end)), Work())
