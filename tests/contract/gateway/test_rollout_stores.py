"""Contract tests of the store of rollouts, on SQLite and PostgreSQL, compared with rollouts in memory."""

import asyncio
import math
import random
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import replace
from datetime import datetime, timedelta

import pytest
from sqlalchemy import update

from fixtures.gateway_entries import RUN, START
from twinkle_services.gateway.catalogue.sql import SqlRunStore
from twinkle_services.gateway.errors import RolloutsTooLarge, RunDataDamaged
from twinkle_services.gateway.rollouts.packing import GROUP_BYTES, merge_all, pack, pack_all
from twinkle_services.gateway.rollouts.rules import (
    LISTED_BYTES,
    MAX_CHANGED_BYTES,
    GroupKey,
    Rollout,
    RolloutFilter,
    RolloutPage,
    RolloutSummary,
)
from twinkle_services.gateway.rollouts.sql import RolloutGroupRow, SqlEndedRollouts, SqlRolloutStore
from twinkle_services.gateway.store.database import Database

LATER = START + timedelta(days=1)
ALICE = ('alice', 'ad-1')
LIMIT = 1 << 30
STEPS = [0, 1, 7, 2**40, 2**53 - 1]
GROUP_IDS = ['0', '00', 'A/b', 'a', 'z~', 'Z']


@pytest.fixture
async def store(database: Database) -> AsyncIterator[SqlRolloutStore]:
    """Empty store."""
    store = SqlRolloutStore(database)
    yield store
    store.close()


def rollout(index: int, numbers: random.Random, *, size: int = 100) -> Rollout:
    """Return a rollout with random content and random values, or unknown values."""
    content = numbers.randbytes(numbers.randint(0, size))
    reward = numbers.choice([None, 0.0, -0.0, 1.5, 1e300, math.inf])
    summary = RolloutSummary(
        index=index,
        content_bytes=len(content),
        reward=reward,
        reward_parts={} if reward is None else {'format': 0.5, 'sum/π': reward},
        advantage=numbers.choice([None, 0.25]),
        finish_reason=numbers.choice(['', 'stop']),
        prompt_token_count=numbers.choice([None, 0, 12]),
        completion_token_count=numbers.choice([None, 0, 2**31 - 1]),
        oldest_version=numbers.choice([None, 0, 2**62]),
        newest_version=numbers.choice([None, 2**62]),
        prompt_preview=numbers.choice(['', '2 + 2\x00"']),
        completion_preview=numbers.choice(['', 'é😀']),
    )
    return Rollout(summary, content)


def plain(index: int, content: bytes = b'') -> Rollout:
    """Return a rollout without optional values."""
    return Rollout(RolloutSummary(index=index, content_bytes=len(content)), content)


async def save(
    store: SqlRolloutStore,
    step: int,
    groups: Mapping[str, Sequence[Rollout]],
    *,
    run: tuple[str, str] = ALICE,
    moment: datetime = START,
    max_bytes: int = LIMIT,
) -> int:
    return await store.save(run, step, groups, moment=moment, max_bytes=max_bytes)


async def pages(
    store: SqlRolloutStore, wanted: RolloutFilter | None = None, *, size: int = 1000, run: tuple[str, str] = ALICE
) -> list[RolloutPage]:
    """Return all pages of a list."""
    found = [await store.list_page(run, wanted or RolloutFilter(), size=size, after=None)]
    while found[-1].next_key is not None:
        found.append(await store.list_page(run, wanted or RolloutFilter(), size=size, after=found[-1].next_key))
    return found


async def keys(store: SqlRolloutStore, wanted: RolloutFilter | None = None, *, size: int = 1000) -> list[GroupKey]:
    """Return the keys of all groups in the order of a list."""
    return [(group.step, group.group_id) for page in await pages(store, wanted, size=size) for group in page.groups]


def in_order(groups: Sequence[GroupKey] | Mapping[GroupKey, object]) -> list[GroupKey]:
    """Return keys in the order of a list: by descending step, then by id."""
    return sorted(groups, key=lambda key: (-key[0], key[1]))


async def test_random_rollouts_are_stored_like_a_mapping(store):
    """Rollouts in any order and in several calls are stored like a mapping's values, and listed in order."""
    numbers = random.Random(5)
    expected: dict[GroupKey, dict[int, Rollout]] = {}
    for _ in range(40):
        step = numbers.choice(STEPS)
        groups = {
            group_id: [rollout(index, numbers) for index in numbers.sample(range(6), numbers.randint(1, 4))]
            for group_id in numbers.sample(GROUP_IDS, numbers.randint(1, 3))
        }
        assert await save(store, step, groups) == 0
        for group_id, rollouts in groups.items():
            expected.setdefault((step, group_id), {}).update({item.summary.index: item for item in rollouts})
    for size in (1, 3, 1000):
        assert await keys(store, size=size) == in_order(expected)
        assert await keys(store, RolloutFilter(is_ascending=True), size=size) == sorted(expected)
    (page,) = await pages(store)
    for group in page.groups:
        stored = expected[group.step, group.group_id]
        assert [repr(summary) for summary in group.rollouts] == [
            repr(stored[index].summary) for index in sorted(stored)
        ]
        for index in range(6):
            found = await store.get(ALICE, (group.step, group.group_id), index)
            assert (found and found.content) == (stored[index].content if index in stored else None)
    assert await store.get(ALICE, (3, '0'), 0) is None
    wanted = RolloutFilter(begin_step=1, end_step=2**40, group_id='A/b')
    assert await keys(store, wanted) == in_order([key for key in expected if 1 <= key[0] < 2**40 and key[1] == 'A/b'])


async def test_a_repeated_call_changes_nothing(database, store):
    """A repeated call stores the same bytes, which count once, and updates the time of its groups."""
    numbers = random.Random(1)
    groups = {'a': [rollout(0, numbers), rollout(3, numbers)], 'b': [rollout(0, numbers)]}
    size_bytes = sum(group.size_bytes for group in pack_all(groups).values())
    for moment in (START, LATER):
        await save(store, 4, groups, moment=moment, max_bytes=size_bytes)
        (page,) = await pages(store)
        assert [group.update_time for group in page.groups] == [moment, moment]
        assert [[item.index for item in group.rollouts] for group in page.groups] == [[0, 3], [0]]
    assert page.removed_group_count == 0


async def test_rollouts_belong_to_one_run_of_one_tenant(store):
    """Runs with the same id of two tenants, and two runs of a tenant, have separate rollouts."""
    runs = [ALICE, ('bob', 'ad-1'), ('alice', 'ad-2')]
    for number, run in enumerate(runs):
        await save(store, 0, {'a': [plain(0, bytes([number]))]}, run=run)
    for number, run in enumerate(runs):
        found = await store.get(run, (0, 'a'), 0)
        assert found is not None
        assert found.content == bytes([number])
    assert (await pages(store, run=('bob', 'ad-2')))[0].groups == []


async def test_oldest_groups_are_removed_for_new_ones(store):
    """A full run removes the groups that were changed first, as a list in memory does, and reports their number."""
    numbers = random.Random(8)
    limit, removed_count = 6 * (GROUP_BYTES + 200), 0
    written: dict[GroupKey, list[Rollout]] = {}
    for _ in range(60):
        step = numbers.randint(0, 9)
        groups = {
            group_id: [rollout(0, numbers, size=300)] for group_id in numbers.sample('abc', numbers.randint(1, 2))
        }
        for group_id in sorted(groups):
            written.pop((step, group_id), None)
            written[step, group_id] = groups[group_id]
        count = 0
        while sum(pack(rollouts).size_bytes for rollouts in written.values()) > limit:
            del written[next(iter(written))]
            count += 1
        assert await save(store, step, groups, max_bytes=limit) == count
        removed_count += count
        assert await keys(store) == in_order(written)
    assert removed_count > 30
    assert (await pages(store))[0].removed_group_count == removed_count


async def test_many_small_groups_are_removed_for_one_large_group(store):
    """A call that stores a large group removes enough older groups, even if one statement cannot delete all of them."""
    small = {f'{index:04}': [plain(0)] for index in range(1000)}
    limit = sum(group.size_bytes for group in pack_all(small).values())
    assert await save(store, 0, small, max_bytes=limit) == 0
    large = random.Random(2).randbytes(limit - GROUP_BYTES - 300)
    assert await save(store, 1, {'large': [plain(0, large)]}, max_bytes=limit) >= 998
    assert (await keys(store))[0] == (1, 'large')


async def test_limits_hold_for_gateways_that_store_at_the_same_time(database, database_url):
    """Concurrent calls of two gateways never exceed the limit, and the groups that were written last are kept."""
    other = await Database.open(database_url)
    stores = [SqlRolloutStore(database), SqlRolloutStore(other)]
    one = pack([plain(0, b'\x01' * 50)]).size_bytes
    calls = [save(stores[index % 2], index, {'a': [plain(0, b'\x01' * 50)]}, max_bytes=7 * one) for index in range(24)]
    assert sum(await asyncio.gather(*calls)) == 17
    (page,) = await pages(stores[1])
    assert (len(page.groups), page.removed_group_count) == (7, 17)
    same = [save(stores[index % 2], 99, {'b': [plain(index)]}, max_bytes=7 * one) for index in range(10)]
    await asyncio.gather(*same)
    (page,) = await pages(stores[0], RolloutFilter(begin_step=99))
    assert [item.index for item in page.groups[0].rollouts] == list(range(10))
    for each in stores:
        each.close()
    await other.close()


async def test_groups_that_exceed_a_limit_are_refused_as_a_whole(store):
    """Groups that exceed the run's limit, or are too large to be changed, are refused, and nothing changes."""
    numbers = random.Random(3)
    groups = {'a': [rollout(0, numbers)], 'b': [rollout(0, numbers)]}
    await save(store, 0, {'a': [plain(0, b'kept')]})
    size_bytes = sum(group.size_bytes for group in {**pack_all(groups), **_merged(groups)}.values())
    with pytest.raises(RolloutsTooLarge, match='rollout_bytes_per_run'):
        await save(store, 0, groups, max_bytes=size_bytes - 1)
    huge = [plain(index, bytes(MAX_CHANGED_BYTES // 4)) for index in range(3)]
    await save(store, 1, {'huge': huge})
    with pytest.raises(RolloutsTooLarge, match='rollout_bytes_per_request'):
        await save(store, 1, {'huge': huge[:2]})
    assert await keys(store) == [(1, 'huge'), (0, 'a')]
    found = await store.get(ALICE, (0, 'a'), 0)
    assert found is not None
    assert found.content == b'kept'
    assert await save(store, 0, groups, max_bytes=size_bytes) == 1


def _merged(groups):
    return merge_all({'a': pack([plain(0, b'kept')])}, {'a': groups['a']})


async def test_pages_of_large_groups_end_early(store):
    """A page ends after a number of bytes, and the next page continues with the next group."""
    parts = {f'part-{index:0122}': 1.0 for index in range(16)}
    rollouts = [Rollout(RolloutSummary(index=index, content_bytes=0, reward_parts=parts), b'') for index in range(512)]
    for step in range(5):
        await save(store, step, {'a': rollouts})
    found = await pages(store, size=200)
    assert 3 * pack(rollouts).summary_bytes > LISTED_BYTES
    assert [group.step for page in found for group in page.groups] == [4, 3, 2, 1, 0]
    assert max(len(page.groups) for page in found) == 2


@pytest.mark.parametrize('damage', [b'', b'damaged', 'truncated', 'changed'])
@pytest.mark.parametrize('column', ['summaries', 'content'])
async def test_damaged_groups_are_errors_of_their_run(database, store, column, damage):
    """A damaged group is an error of calls that read it, and of no other step or run."""
    groups = {'a': [plain(0, b'first' * 50), plain(1, b'second' * 50)]}
    for run, step in ((ALICE, 1), (ALICE, 2), (('alice', 'ad-2'), 1)):
        await store.save(run, step, groups, moment=START, max_bytes=LIMIT)
    stored = getattr(pack_all(groups)['a'], column)
    changed = stored[:-9] + bytes(byte ^ 255 for byte in stored[-9:])
    damaged = {'truncated': stored[: len(stored) // 2], 'changed': changed}.get(damage, damage)
    row = RolloutGroupRow
    async with database.write() as connection:
        await connection.execute(update(row).where(row.run_id == 'ad-1', row.step == 1).values(**{column: damaged}))
    calls = [
        lambda: store.get(ALICE, (1, 'a'), 0),
        lambda: store.save(ALICE, 1, {'a': [plain(2, b'third')]}, moment=START, max_bytes=LIMIT),
    ]
    if column == 'summaries':
        calls.append(lambda: store.list_page(ALICE, RolloutFilter(), size=9, after=None))
    for call in calls:
        with pytest.raises(RunDataDamaged) as caught:
            await call()
        assert dict(caught.value.metadata()) == {'id': 'ad-1', 'kind': 'rollouts'}
    assert (await store.get(ALICE, (2, 'a'), 1)).content == b'second' * 50
    assert (await store.get(('alice', 'ad-2'), (1, 'a'), 0)).content == b'first' * 50
    page = await store.list_page(ALICE, RolloutFilter(begin_step=2), size=9, after=None)
    assert [group.step for group in page.groups] == [2]


async def test_rollouts_of_runs_that_are_no_longer_listed_are_removed(database, store):
    """Old rollouts of unknown runs are removed; rollouts of listed runs, and newer rollouts, are kept."""
    await SqlRunStore(database).save(replace(RUN, tenant_id='alice', run_id='ad-1'))
    await SqlRunStore(database).save(replace(RUN, tenant_id='bob', run_id='ad-2'))
    for run_id in ('ad-1', 'ad-2', 'ad-3'):
        await save(store, 0, {'a': [plain(0)], 'b': [plain(0)]}, run=('alice', run_id))
    await save(store, 1, {'a': [plain(0)]}, run=('alice', 'ad-3'), moment=LATER)
    assert await SqlEndedRollouts(database).purge(before=LATER) == 3
    assert await SqlEndedRollouts(database).purge(before=LATER) == 0
    counts = [len((await pages(store, run=('alice', run_id)))[0].groups) for run_id in ('ad-1', 'ad-2', 'ad-3')]
    assert counts == [2, 0, 3]
