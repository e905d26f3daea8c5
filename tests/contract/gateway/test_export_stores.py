"""Contract tests of the export store, on each database."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from twinkle_services.gateway.exports.rules import Export, ExportState
from twinkle_services.gateway.exports.sql import SqlExportStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.errors import QuotaExceeded

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
async def store(database_url: str) -> AsyncIterator[SqlExportStore]:
    """Yield an empty store."""
    database = await Database.open(database_url)
    yield SqlExportStore(database)
    await database.close()


def numbered(number: int, **fields: Any) -> Export:
    """Return an export that was accepted `number` seconds after START."""
    later = START + timedelta(seconds=number)
    changes: dict[str, Any] = {
        'export_id': f'ex-{number}',
        'request_id': f'rq-{number}',
        'create_time': later,
        'due_time': later,
    }
    return replace(EXPORT, **{**changes, **fields})


async def add(store: SqlExportStore, export: Export, *, max_unfinished: int = 16) -> Export:
    """Add an export unless its request id is stored or an equal push is unfinished; return the stored export."""
    return await store.add_if_absent(export, is_same=export.is_same_export, max_unfinished=max_unfinished)


async def test_concurrent_equal_pushes_add_one_export(store: SqlExportStore) -> None:
    """Concurrent equal pushes of a tenant return the same export; another tenant's push is separate."""
    added = await asyncio.gather(*(add(store, numbered(number)) for number in range(8)))
    assert len({export.export_id for export in added}) == 1
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
async def test_different_push_is_another_export(store: SqlExportStore, field: str, value: object) -> None:
    """A push with another target, checkpoint, digest or visibility adds another export."""
    await add(store, EXPORT)
    assert (await add(store, numbered(2, **{field: value}))).export_id == 'ex-2'


async def test_request_id_has_priority_over_an_equal_push(store: SqlExportStore) -> None:
    """A repeated request id returns its own export, even if this is finished and an equal push is unfinished."""
    await add(store, EXPORT)
    await store.cancel('alice', 'ex-1', now=START)
    assert (await add(store, numbered(2))).export_id == 'ex-2'
    again = await add(store, numbered(3, request_id='rq-1'))
    assert (again.export_id, again.state) == ('ex-1', ExportState.CANCELLED)


async def test_equal_push_is_returned_at_the_limit(store: SqlExportStore) -> None:
    """An equal push returns its export at the limit of unfinished exports, and another push is refused."""
    await add(store, EXPORT, max_unfinished=1)
    assert (await add(store, numbered(2), max_unfinished=1)).export_id == 'ex-1'
    other = numbered(3, target='hf://org/other')
    with pytest.raises(QuotaExceeded):
        await add(store, other, max_unfinished=1)
    await store.cancel('alice', 'ex-1', now=START)
    assert (await add(store, other, max_unfinished=1)).export_id == 'ex-3'


async def test_claim_is_exclusive_until_its_lease_expires(store: SqlExportStore) -> None:
    """An expired claim can be replaced; then the old claim cannot be renewed or settled."""
    await add(store, EXPORT)
    assert await store.claim(START - LEASE, lease=LEASE) is None
    first = await store.claim(START, lease=LEASE)
    assert first is not None
    assert (first.state, first.attempt_count) == (ExportState.RUNNING, 1)
    assert await store.claim(START, lease=LEASE) is None
    assert await store.renew(first, read_bytes=5, size_bytes=9, now=START + LEASE / 2, lease=LEASE)
    assert await store.claim(START + LEASE, lease=LEASE) is None
    second = await store.claim(START + 2 * LEASE, lease=LEASE)
    assert second is not None
    assert (second.export_id, second.attempt_count, second.read_bytes) == ('ex-1', 2, 0)
    assert not await store.renew(first, read_bytes=9, size_bytes=9, now=START, lease=LEASE)
    assert not await store.settle(replace(first, state=ExportState.FAILED))
    assert await store.settle(replace(second, state=ExportState.DONE, url='https://hub/org/name'))
    stored = await store.get('alice', 'ex-1')
    assert stored is not None
    assert (stored.state, stored.url) == (ExportState.DONE, 'https://hub/org/name')


async def test_longest_due_export_is_claimed_first(store: SqlExportStore) -> None:
    """Due exports are each claimed once, in the order of their due times."""
    for number in (3, 1, 2):
        await add(store, numbered(number, target=f'hf://org/name-{number}'))
    claims = [await store.claim(START + LEASE, lease=LEASE) for _ in range(4)]
    assert [claim and claim.export_id for claim in claims] == ['ex-1', 'ex-2', 'ex-3', None]


async def test_cancelled_export_loses_its_claim_and_token(store: SqlExportStore) -> None:
    """A cancellation deletes the token and revokes the claim; a finished export can be deleted."""
    await add(store, EXPORT)
    await add(store, numbered(2, target='hf://org/other'))
    claim = await store.claim(START, lease=LEASE)
    assert claim is not None
    cancelled = await store.cancel('alice', 'ex-1', now=START)
    assert cancelled is not None
    assert (cancelled.state, cancelled.sealed_token) == (ExportState.CANCELLED, b'')
    assert not await store.renew(claim, read_bytes=1, size_bytes=1, now=START, lease=LEASE)
    assert not await store.settle(replace(claim, state=ExportState.DONE))
    assert await store.cancel('bob', 'ex-1', now=START) is None
    assert await store.delete_finished(before=START) == 0
    assert await store.delete_finished(before=START + LEASE) == 1
    assert (await store.get('alice', 'ex-1'), await store.get('bob', 'ex-2')) == (None, None)
    assert await store.get('alice', 'ex-2') is not None
