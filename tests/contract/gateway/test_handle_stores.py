"""Contract tests of the store of sampling handles, on SQLite and PostgreSQL."""

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import pytest

from twinkle_services.gateway.sampling.rules import SamplingHandle
from twinkle_services.gateway.sampling.sql import SqlHandleStore
from twinkle_services.gateway.store.database import Database

START = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
HANDLE = SamplingHandle(
    handle_id='ses-1:sample:0',
    tenant_id='alice',
    session_id='ses-1',
    base_model='',
    adapter_id='ses-1:train:0',
    future_id='fu-1',
    is_inflight=True,
    create_time=START,
)


@pytest.fixture
def store(database: Database) -> SqlHandleStore:
    """Return an empty store."""
    return SqlHandleStore(database)


async def test_handle_is_stored_as_first_created(store: SqlHandleStore) -> None:
    """A stored handle has all fields of the created handle, a repeat changes nothing, and tenants have separate ids."""
    assert await store.add_if_absent(HANDLE) == HANDLE
    assert await store.add_if_absent(replace(HANDLE, base_model='other', is_inflight=False)) == HANDLE
    assert await store.get('alice', HANDLE.handle_id) == HANDLE
    assert await store.get('bob', HANDLE.handle_id) is None
    theirs = replace(HANDLE, tenant_id='bob', adapter_id='', future_id='', base_model='tiny')
    assert await store.add_if_absent(theirs) == theirs
    assert await store.get('alice', HANDLE.handle_id) == HANDLE


async def test_base_model_and_version_of_a_handle_are_set_once(store: SqlHandleStore) -> None:
    """Base model and version are set once, other fields do not change, and settling an absent handle is allowed."""
    await store.add_if_absent(HANDLE)
    await store.settle('alice', HANDLE.handle_id, base_model='tiny', version=1 << 40)
    await store.settle('bob', HANDLE.handle_id, base_model='other', version=1)
    known = replace(HANDLE, base_model='tiny', version=1 << 40)
    assert await store.get('alice', HANDLE.handle_id) == known
    await store.settle('alice', HANDLE.handle_id, base_model='', version=None)
    await store.settle('alice', HANDLE.handle_id, base_model='other', version=7)
    assert await store.get('alice', HANDLE.handle_id) == known


async def test_each_copy_gets_a_distinct_number(store: SqlHandleStore) -> None:
    """Concurrent copies are numbered from 1 without gaps; an absent handle gets no number."""
    await store.add_if_absent(HANDLE)
    counts = await asyncio.gather(*(store.count_clone('alice', HANDLE.handle_id) for _ in range(16)))
    assert sorted(counts) == list(range(1, 17))
    assert await store.count_clone('bob', HANDLE.handle_id) is None


async def test_session_lists_its_handles_oldest_first(store: SqlHandleStore) -> None:
    """A session lists only its own handles, and no handles of other tenants."""
    for number, (session, tenant) in enumerate([('ses-1', 'alice'), ('ses-2', 'alice'), ('ses-1', 'bob')]):
        for hours in (2, 1):
            name = f'{number}-{hours}'
            await store.add_if_absent(
                replace(
                    HANDLE,
                    handle_id=name,
                    session_id=session,
                    tenant_id=tenant,
                    create_time=START + timedelta(hours=hours),
                )
            )
    assert [item.handle_id for item in await store.list_of_session('alice', 'ses-1')] == ['0-1', '0-2']
