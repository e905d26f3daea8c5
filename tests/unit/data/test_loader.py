"""Cursors of loaders, and locks of tenants."""

import asyncio
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.data.application.tenant_locks import TenantLocks
from twinkle_services.data.domain import Cursor, Loader
from twinkle_services.kit.errors import InvalidField, QueueFull

LOADER = Loader(
    loader_id='ld-1',
    tenant_id='alice',
    dataset_id='ds-1',
    content_digest='d',
    row_count=10,
    batch_size=4,
    shuffle_seed=None,
    epoch_count=1,
    is_last_partial_dropped=False,
    request_id='r',
    fingerprint='f',
)


@given(st.integers(0, 100), st.integers(1, 20), st.booleans())
def test_batches_cover_an_epoch(row_count: int, batch_size: int, flag: bool) -> None:  # noqa: FBT001 (drawn)
    """The batches of an epoch contain all its rows, except the rows of an incomplete last batch that is dropped."""
    loader = replace(LOADER, row_count=row_count, batch_size=batch_size, is_last_partial_dropped=flag)
    assert (loader.batch_count - 1) * batch_size < loader.epoch_rows <= loader.batch_count * batch_size
    assert loader.epoch_rows == (row_count - row_count % batch_size if flag else row_count)


def test_an_unlimited_loader_without_batches_finishes() -> None:
    """A loader with unlimited epochs finishes immediately if an epoch has no batch."""
    assert replace(LOADER, epoch_count=0).end_row is None
    assert replace(LOADER, epoch_count=0, row_count=3, is_last_partial_dropped=True).end_row == 0
    assert replace(LOADER, epoch_count=3).end_row == 30


def test_cursor_is_valid_for_every_loader_of_the_same_rows_and_order() -> None:
    """A cursor depends on the rows, the batches and the order. It does not depend on ids or the number of epochs."""
    cursor = LOADER.cursor_at(4)
    assert replace(LOADER, loader_id='ld-2', dataset_id='ds-2', epoch_count=9).rows_before(cursor) == 4
    others = {'content_digest': 'e', 'batch_size': 2, 'shuffle_seed': 0, 'is_last_partial_dropped': True}
    for name, value in others.items():
        with pytest.raises(InvalidField):
            replace(LOADER, **{name: value}).rows_before(cursor)
    with pytest.raises(InvalidField):
        LOADER.rows_before(Cursor(8, cursor.state))


def test_a_row_count_is_valid_only_between_batches() -> None:
    """A cursor that only has a row count is refused inside a batch and after the end."""
    twice = replace(LOADER, epoch_count=2)
    assert [twice.rows_before(Cursor(count, b'')) for count in (0, 4, 8, 10, 14, 20)] == [0, 4, 8, 10, 14, 20]
    for count in (1, 9, 12, 24):
        with pytest.raises(InvalidField):
            twice.rows_before(Cursor(count, b''))
    with pytest.raises(InvalidField):
        replace(LOADER, row_count=3, is_last_partial_dropped=True).rows_before(Cursor(4, b''))


async def test_changes_of_one_tenant_run_in_order() -> None:
    """The changes of a tenant run one at a time, in the order of their requests, and do not delay other tenants."""
    locks, order = TenantLocks(queue_limit=8), list[str]()
    may_finish = asyncio.Event()

    async def change(tenant_id: str, name: str, *, is_blocked: bool) -> None:
        async with locks.hold(tenant_id):
            order.append(f'{name} begins')
            if is_blocked:
                await may_finish.wait()
            order.append(f'{name} ends')

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(change('alice', 'a1', is_blocked=True))
        tasks.create_task(change('alice', 'a2', is_blocked=False))
        await tasks.create_task(change('bob', 'b', is_blocked=False))
        may_finish.set()
    assert order == ['a1 begins', 'b begins', 'b ends', 'a1 ends', 'a2 begins', 'a2 ends']


async def test_waiting_changes_are_limited() -> None:
    """A tenant's queue has a limited length, and a refused change takes no place in the queue."""
    locks = TenantLocks(queue_limit=1)
    async with asyncio.TaskGroup() as tasks, locks.hold('alice'):

        async def wait() -> None:
            async with locks.hold('alice'):
                pass

        waiting = tasks.create_task(wait())
        # The task must reach its lock before the next change is refused.
        await asyncio.sleep(0)
        for _ in range(2):
            with pytest.raises(QueueFull):
                await wait()
        async with locks.hold('bob'):
            assert not waiting.done()
