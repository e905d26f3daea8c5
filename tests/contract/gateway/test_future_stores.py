"""Contract tests of the stores of futures and payloads, for every implementation."""

import errno
from collections.abc import AsyncIterator, Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import insert

from fixtures.future_stores import MemoryFutureStore, MemoryPayloadStore
from twinkle_services.gateway.errors import PositionMissing
from twinkle_services.gateway.futures.payloads import PayloadFiles
from twinkle_services.gateway.futures.rules import Future, FutureRequest, FutureState, FutureTaken, future_id_of_name
from twinkle_services.gateway.futures.sql import GatewayRow, SqlFutureStore
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.errors import DiskFull, InvalidField, QueueFull, ServiceUnreachable

START = datetime(2026, 3, 1, 12, 30, 15, 123456, tzinfo=UTC)
DAY = timedelta(days=1)


def future_of(key: str, *, lane: str = '', position: int = 0, tenant: str = 'alice') -> Future:
    """Return an accepted future."""
    request = FutureRequest(
        kind='execute', key=key, payload=key.encode(), session_id='ses-1', lane=lane, position=position, note='{"a": 1}'
    )
    return Future.accepted(request, tenant_id=tenant, moment=START)


@pytest.fixture(params=['memory', 'sqlite', 'postgres'])
async def database(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Database | None]:
    """Yield an empty database, or None for the store in memory."""
    if request.param == 'memory':
        yield None
        return
    is_postgres = request.param == 'postgres'
    url = request.getfixturevalue('postgres_database') if is_postgres else f'sqlite:///{tmp_path / "gateway.db"}'
    database = await Database.open(url)
    yield database
    await database.close()


@pytest.fixture
def store(database: Database | None) -> Any:
    """Return an empty store."""
    return MemoryFutureStore() if database is None else SqlFutureStore(database)


@pytest.fixture
async def lane_store(store: Any, database: Database | None) -> Any:
    """Return an empty store that two gateways share."""
    if database is not None:
        async with database.write() as connection:
            for name in ('gw-1', 'gw-2'):
                row = {'gateway_id': name, 'payload_store_id': 'ps', 'heartbeat_time': START}
                await connection.execute(insert(GatewayRow).values(row))
    return store


@pytest.fixture(params=['memory', 'files'])
def payloads(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Any]:
    """Yield an empty store of payloads."""
    if request.param == 'memory':
        yield MemoryPayloadStore()
        return
    files = PayloadFiles(tmp_path / 'payloads')
    yield files
    files.close()


async def test_future_is_stored_as_first_accepted(store: Any) -> None:
    """A stored future has all fields of the accepted future, a repeat has no effect, and tenants are isolated."""
    first = future_of('one', lane='ad-1', position=3)
    assert await store.add_if_absent(first) == first
    assert await store.add_if_absent(replace(first, note='other', fingerprint='x')) == first
    assert await store.get('alice', first.future_id) == first
    assert await store.get('bob', first.future_id) is None
    assert await store.get('alice', 'fu-none') is None


async def test_number_changes_only_if_the_expected_one_is_stored(store: Any) -> None:
    """If two writers expect the same number, only the first one changes it."""
    future = await store.add_if_absent(future_of('one'))
    assert await store.number(future, 7, instead_of=None) == 7
    assert await store.number(future, 8, instead_of=None) == 7
    assert await store.number(future, 9, instead_of=7) == 9
    assert await store.number(future, 10, instead_of=7) == 9
    assert (await store.get('alice', future.future_id)).number == 9


async def test_future_is_settled_once(store: Any) -> None:
    """The first outcome of a future is final, and the future's number does not change."""
    future = await store.add_if_absent(future_of('one'))
    await store.number(future, 7, instead_of=None)
    assert (await store.settle(future.done(moment=START + DAY))).state is FutureState.DONE
    late = await store.settle(future.failed(InvalidField('a', 'b'), moment=START + 2 * DAY))
    assert late == await store.get('alice', future.future_id)
    assert (late.state, late.finish_time, late.error, late.number) == (FutureState.DONE, START + DAY, None, 7)


@pytest.mark.parametrize(
    'error',
    [
        InvalidField('operation.batch', 'must not be empty'),
        QueueFull(queue_length=3, queue_limit=2, wait=timedelta(seconds=2)),
        PositionMissing(lane='ad-1', position=3, missing=2),
    ],
    ids=lambda error: error.reason,
)
async def test_error_is_stored_with_all_fields(store: Any, error: Any) -> None:
    """A stored error has its code, reason, message, metadata, violations and retry time."""
    future = await store.add_if_absent(future_of('one'))
    await store.settle(future.failed(error, moment=START))
    stored = (await store.get('alice', future.future_id)).error
    assert (stored.code, stored.reason, str(stored)) == (error.code, error.reason, str(error))
    assert (dict(stored.metadata()), stored.violations) == (dict(error.metadata()), error.violations)
    assert stored.retry_after == error.retry_after


async def test_waiting_futures_are_listed_in_order(store: Any) -> None:
    """Waiting futures are listed by lane and position, not by arrival; finished futures are not listed."""
    for position in (3, 1, 2):
        await store.add_if_absent(future_of(f'b{position}', lane='b', position=position))
    await store.add_if_absent(future_of('a1', lane='a', position=1, tenant='bob'))
    await store.add_if_absent(future_of('free'))
    done = await store.add_if_absent(future_of('b0', lane='b', position=0))
    await store.settle(done.done(moment=START))
    assert [future.key for future in await store.list_waiting()] == ['free', 'a1', 'b1', 'b2', 'b3']


async def test_unfinished_futures_of_a_session_are_listed(store: Any) -> None:
    """Only the unfinished futures of the tenant's session are listed."""
    first = await store.add_if_absent(future_of('first'))
    await store.add_if_absent(replace(future_of('other'), session_id='ses-other'))
    await store.add_if_absent(future_of('foreign', tenant='bob'))
    done = await store.add_if_absent(future_of('done'))
    await store.settle(done.done(moment=START))
    assert [future.key for future in await store.list_of_session('alice', first.session_id)] == ['first']


async def test_next_position_follows_the_last_finished_one(store: Any) -> None:
    """The next position of a tenant's lane follows the position of the last finished future."""
    assert await store.next_position('alice', 'b') == 0
    for position in (0, 1, 2):
        await store.add_if_absent(future_of(f'b{position}', lane='b', position=position))
    for position in (0, 1):
        await store.settle(future_of(f'b{position}', lane='b', position=position).done(moment=START))
    assert await store.next_position('alice', 'b') == 2
    assert await store.next_position('bob', 'b') == 0


async def test_finished_futures_expire_and_are_deleted(store: Any) -> None:
    """Waiting futures are kept, expired futures are deleted later, and a lane's last finished future is not deleted."""
    lane = [future_of(f'b{position}', lane='b', position=position) for position in range(3)]
    free, waiting = future_of('free'), future_of('waiting', lane='b', position=3)
    for future in (*lane, free, waiting):
        await store.add_if_absent(future)
    for future in (*lane, free):
        await store.settle(future.done(moment=START))
    assert list(await store.list_finished(finished_before=START, limit=9)) == []
    found = await store.list_finished(finished_before=START + DAY, limit=9)
    assert {future.key for future in found} == {'b0', 'b1', 'b2', 'free'}
    assert len(await store.list_finished(finished_before=START + DAY, limit=2)) == 2
    await store.expire([future.future_id for future in (*found, waiting)])
    assert (await store.get('alice', free.future_id)).state is FutureState.EXPIRED
    assert (await store.get('alice', waiting.future_id)).state is FutureState.WAITING
    assert list(await store.list_finished(finished_before=START + DAY, limit=9)) == []
    assert set(await store.find_known([free.future_id, waiting.future_id, 'fu-none'])) == {waiting.future_id}
    assert await store.drop_expired(finished_before=START) == 0
    assert await store.drop_expired(finished_before=START + DAY) == 3
    assert await store.next_position('alice', 'b') == 3


async def test_payload_is_stored_replaced_and_deleted(payloads: Any) -> None:
    """Data that is stored with a name replaces earlier data, and is absent after one or more deletions."""
    future = future_of('one')
    assert await payloads.get(future.payload_name) is None
    for data in (b'', b'\0' * 100_000, b'last'):
        await payloads.put(future.payload_name, data)
        assert await payloads.get(future.payload_name) == data
    await payloads.delete(future.payload_name)
    await payloads.delete(future.payload_name)
    assert await payloads.get(future.payload_name) is None


async def test_size_of_a_payload_is_its_number_of_bytes(payloads: Any) -> None:
    """The size of a payload is its number of bytes, and 0 if the payload is absent."""
    future = future_of('one')
    await payloads.put(future.payload_name, b'query')
    assert await payloads.size(future.payload_name) == 5
    assert await payloads.size(future.result_name) == 0


async def test_old_payloads_are_found_with_their_futures(payloads: Any) -> None:
    """Payloads are listed by the time at which they were stored, and their names identify their futures."""
    future = future_of('one')
    await payloads.put(future.payload_name, b'query')
    await payloads.put(future.result_name, b'result')
    now = datetime.now(UTC)
    assert list(await payloads.list_old(stored_before=now - DAY)) == []
    names = await payloads.list_old(stored_before=now + DAY)
    assert set(names) == {future.payload_name, future.result_name}
    assert {future_id_of_name(name) for name in names} == {future.future_id}


@pytest.fixture
def files(tmp_path: Path) -> Iterator[PayloadFiles]:
    """Yield an empty store of files."""
    store = PayloadFiles(tmp_path / 'payloads')
    yield store
    store.close()


@pytest.mark.parametrize('name', ['../../etc/passwd', 'a/../x.result', '.half-1', '', 'FU-1.result', 'fu-1\0.result'])
async def test_invalid_file_name_is_refused(files: PayloadFiles, name: str) -> None:
    """A name that is not a payload name, such as a path outside the folder, is refused."""
    with pytest.raises(ValueError, match=r'.'):
        await files.put(name, b'x')


async def test_request_above_the_free_space_of_the_disk_is_refused(files: PayloadFiles) -> None:
    """A new request is compared with the free space of the store's disk, even if the store's folder is missing."""
    await files.check_free_space(1)
    with pytest.raises(DiskFull) as refused:
        await files.check_free_space(1 << 60)
    assert refused.value.needed_bytes == 1 << 60


async def test_damaged_file_counts_as_missing(files: PayloadFiles, tmp_path: Path) -> None:
    """A damaged file counts as missing, an old temporary file is deleted, and other files are kept."""
    future = future_of('one')
    await files.put(future.result_name, b'result')
    (path,) = (tmp_path / 'payloads').glob('*/*')
    path.write_bytes(path.read_bytes()[:-1])
    assert await files.get(future.result_name) is None
    temporary = path.parent / '.half-one'
    temporary.write_bytes(b'x')
    unrelated = path.parent / '.nfs000000000001'
    unrelated.write_bytes(b'y')
    assert await files.list_old(stored_before=datetime.now(UTC) + DAY) == [path.name]
    assert not temporary.exists()
    assert unrelated.exists()


async def test_accepted_requests_survive_a_power_loss(tmp_path: Path) -> None:
    """A payload and the names of its folder and file are flushed to disk before `put` returns."""
    flushed: list[Path] = []
    root = tmp_path / 'payloads'
    root.mkdir()
    store = PayloadFiles(root, sync=lambda descriptor: flushed.append(Path(f'/proc/self/fd/{descriptor}').readlink()))
    await store.put(future_of('one').result_name, b'x')
    store.close()
    (path,) = root.glob('*/*')
    new_folder, content, new_name = flushed
    assert (new_folder, content.parent, new_name) == (root, path.parent, path.parent)
    assert content.name.startswith('.half-')


async def test_failed_flush_refuses_the_request(tmp_path: Path) -> None:
    """A payload whose file or folder cannot be flushed to disk is refused, and no temporary file remains."""
    for failing in range(3):
        remaining = [failing]

        def sync(descriptor: int, remaining: list[int] = remaining) -> None:
            del descriptor
            remaining[0] -= 1
            if remaining[0] < 0:
                raise OSError(errno.EIO, 'failing disk')

        store = PayloadFiles(tmp_path / str(failing), sync=sync)
        with pytest.raises(ServiceUnreachable):
            await store.put(future_of('one').result_name, b'x')
        store.close()
        assert not list((tmp_path / str(failing)).rglob('.half-*'))


async def test_accepted_rows_survive_a_power_loss(tmp_path: Path) -> None:
    """Every connection to a SQLite database flushes each commit to disk."""
    database = await Database.open(f'sqlite:///{tmp_path / "gateway.db"}')
    for connect in (database.write, database.read):
        async with connect() as connection:
            # 2 stands for FULL.
            assert (await connection.exec_driver_sql('PRAGMA synchronous')).scalar() == 2
    await database.close()


async def test_unusable_folder_raises_a_domain_error(tmp_path: Path) -> None:
    """A write to a folder that cannot be created raises ServiceUnreachable."""
    (tmp_path / 'file').write_bytes(b'')
    store = PayloadFiles(tmp_path / 'file')
    with pytest.raises(ServiceUnreachable):
        await store.put(future_of('one').result_name, b'x')
    store.close()


async def test_finished_futures_of_a_topic_are_listed_in_order(store: Any) -> None:
    """Finished futures are listed by finish time, without expired futures and those of other topics or tenants."""
    finish_hours = {'a': 3, 'b': 1, 'c': 2}
    for key, hours in finish_hours.items():
        future = replace(future_of(key), topic='topic-1')
        await store.add_if_absent(future)
        await store.settle(future.done(moment=START + timedelta(hours=hours)))
    other = replace(future_of('d'), topic='topic-2')
    await store.add_if_absent(other)
    await store.settle(other.done(moment=START))
    await store.add_if_absent(replace(future_of('e'), topic='topic-1'))

    async def keys(since: datetime | None, limit: int = 9, tenant: str = 'alice') -> list[str]:
        return [item.key for item in await store.list_by_topic(tenant, 'topic-1', since=since, limit=limit)]

    assert await keys(None) == ['b', 'c', 'a']
    assert await keys(None, limit=2) == ['b', 'c']
    assert await keys(START + timedelta(hours=2)) == ['c', 'a']
    assert await keys(None, tenant='bob') == []
    await store.expire([future_of('c').future_id])
    assert await keys(None) == ['b', 'a']


async def test_lane_has_one_owner_while_futures_wait(lane_store: Any) -> None:
    """A future is assigned to the owner of its lane; a lane without waiting futures can get another owner."""
    first = replace(future_of('b0', lane='b'), owner='gw-1')
    assert await lane_store.add_if_absent(first) is first
    second = await lane_store.add_if_absent(replace(future_of('b1', lane='b', position=1), owner='gw-2'))
    assert second.owner == 'gw-1'
    free = replace(future_of('free'), owner='gw-2')
    assert await lane_store.add_if_absent(free) is free
    assert [future.key for future in await lane_store.list_waiting('gw-1')] == ['b0', 'b1']
    assert [future.key for future in await lane_store.list_waiting('gw-2')] == ['free']
    for future in (first, second):
        await lane_store.settle(future.done(moment=START))
    third = replace(future_of('b2', lane='b', position=2), owner='gw-2')
    assert await lane_store.add_if_absent(third) is third


async def test_only_the_owner_numbers_and_settles(lane_store: Any) -> None:
    """Another gateway cannot number or settle a future; its attempt to number the future raises FutureTaken."""
    future = await lane_store.add_if_absent(replace(future_of('one'), owner='gw-1'))
    other_owner = replace(future, owner='gw-2')
    with pytest.raises(FutureTaken):
        await lane_store.number(other_owner, 7, instead_of=None)
    assert await lane_store.settle(other_owner.done(moment=START)) == future
    assert other_owner.result_name != future.result_name
    assert await lane_store.number(future, 8, instead_of=None) == 8
    assert (await lane_store.settle(future.done(moment=START))).state is FutureState.DONE
