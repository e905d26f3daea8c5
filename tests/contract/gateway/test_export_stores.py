"""One suite over every implementation of the store of exports."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from services.gateway.exports.ports import ExportStore
from services.gateway.exports.rules import Export, ExportState
from services.gateway.exports.sql import SqlExportStore
from services.gateway.store.database import Database
from services.kit.errors import QuotaExceeded

START = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
LEASE = timedelta(seconds=30)
EXPORT = Export(
    export_id='ex-1',
    tenant_id='alice',
    request_id='rq-1',
    checkpoint_path='twinkle://ad-1/weights/best',
    digest='ab',
    target='hf://org/name',
    is_private=True,
    sealed_token=b'sealed',
    create_time=START,
    update_time=START,
    due_time=START,
)


@pytest.fixture
async def store(database_url: str) -> AsyncIterator[ExportStore]:
    """An empty store."""
    database = await Database.open(database_url)
    yield SqlExportStore(database)
    await database.close()


def numbered(number: int, **fields: Any) -> Export:
    """Return another export, accepted a little later."""
    later = START + timedelta(seconds=number)
    of_it: dict[str, Any] = {
        'export_id': f'ex-{number}',
        'request_id': f'rq-{number}',
        'create_time': later,
        'due_time': later,
    }
    return replace(EXPORT, **{**of_it, **fields})


async def add(store: ExportStore, export: Export, *, most_unfinished: int = 16) -> Export:
    """Add an export, unless one like it is under way."""
    return await store.add_if_absent(export, is_same=export.is_push_of, most_unfinished=most_unfinished)


async def test_pushes_that_come_at_once_are_one(store: ExportStore) -> None:
    """Whichever came first is answered to all; another tenant's is another."""
    told = await asyncio.gather(*(add(store, numbered(number)) for number in range(8)))
    assert len({export.export_id for export in told}) == 1
    foreign = numbered(9, tenant_id='bob')
    assert (await add(store, foreign)).export_id == 'ex-9'


@pytest.mark.parametrize(
    ('field', 'value'),
    [
        ('target', 'hf://org/other'),
        ('digest', 'cd'),
        ('checkpoint_path', 'twinkle://ad-1/weights/last'),
        ('is_private', False),
    ],
)
async def test_what_differs_is_another_export(store: ExportStore, field: str, value: object) -> None:
    """In where it goes, what is sent, or who may see it."""
    await add(store, EXPORT)
    assert (await add(store, numbered(2, **{field: value}))).export_id == 'ex-2'


async def test_a_request_is_answered_before_all_else(store: ExportStore) -> None:
    """With its own export as it is now, though that is over and one like it is under way."""
    await add(store, EXPORT)
    await store.cancel('alice', 'ex-1', now=START)
    assert (await add(store, numbered(2))).export_id == 'ex-2'
    again = await add(store, numbered(3, request_id='rq-1'))
    assert (again.export_id, again.state) == ('ex-1', ExportState.CANCELLED)


async def test_a_full_store_still_answers_what_is_under_way(store: ExportStore) -> None:
    """Nothing is added for it; anything else is refused until one is over."""
    await add(store, EXPORT, most_unfinished=1)
    assert (await add(store, numbered(2), most_unfinished=1)).export_id == 'ex-1'
    other = numbered(3, target='hf://org/other')
    with pytest.raises(QuotaExceeded):
        await add(store, other, most_unfinished=1)
    await store.cancel('alice', 'ex-1', now=START)
    assert (await add(store, other, most_unfinished=1)).export_id == 'ex-3'


async def test_a_claim_is_one_gateways_until_its_lease_ends(store: ExportStore) -> None:
    """Then it is the next one's, and the first can neither lengthen nor settle it."""
    await add(store, EXPORT)
    assert await store.claim(START - LEASE, lease=LEASE) is None
    first = await store.claim(START, lease=LEASE)
    assert first is not None
    assert (first.state, first.attempt_count) == (ExportState.RUNNING, 1)
    assert await store.claim(START, lease=LEASE) is None
    assert await store.keep(first, read_bytes=5, size_bytes=9, now=START + LEASE / 2, lease=LEASE)
    assert await store.claim(START + LEASE, lease=LEASE) is None
    second = await store.claim(START + 2 * LEASE, lease=LEASE)
    assert second is not None
    assert (second.export_id, second.attempt_count, second.read_bytes) == ('ex-1', 2, 0)
    assert not await store.keep(first, read_bytes=9, size_bytes=9, now=START, lease=LEASE)
    assert not await store.settle(replace(first, state=ExportState.FAILED))
    assert await store.settle(replace(second, state=ExportState.DONE, url='https://hub/org/name'))
    kept = await store.get('alice', 'ex-1')
    assert kept is not None
    assert (kept.state, kept.url) == (ExportState.DONE, 'https://hub/org/name')


async def test_what_has_been_due_longest_is_begun_first(store: ExportStore) -> None:
    """Each once."""
    for number in (3, 1, 2):
        await add(store, numbered(number, target=f'hf://org/name-{number}'))
    claims = [await store.claim(START + LEASE, lease=LEASE) for _ in range(4)]
    assert [claim and claim.export_id for claim in claims] == ['ex-1', 'ex-2', 'ex-3', None]


async def test_a_cancelled_export_is_nobodys(store: ExportStore) -> None:
    """Its token is gone, and its claim ends; what is over is forgotten in time, and the rest is not."""
    await add(store, EXPORT)
    await add(store, numbered(2, target='hf://org/other'))
    claim = await store.claim(START, lease=LEASE)
    assert claim is not None
    cancelled = await store.cancel('alice', 'ex-1', now=START)
    assert cancelled is not None
    assert (cancelled.state, cancelled.sealed_token) == (ExportState.CANCELLED, b'')
    assert not await store.keep(claim, read_bytes=1, size_bytes=1, now=START, lease=LEASE)
    assert not await store.settle(replace(claim, state=ExportState.DONE))
    assert await store.cancel('bob', 'ex-1', now=START) is None
    assert await store.forget(before=START) == 0
    assert await store.forget(before=START + LEASE) == 1
    assert (await store.get('alice', 'ex-1'), await store.get('bob', 'ex-2')) == (None, None)
    assert await store.get('alice', 'ex-2') is not None
