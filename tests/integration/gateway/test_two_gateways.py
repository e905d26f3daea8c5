"""Tests of two gateways on one PostgreSQL database: clients may use both, and one gateway may fail."""

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest

from fixtures.fake_samplers import until
from fixtures.futures import HEARTBEAT, GatewayFutures, Recorder, running_futures
from twinkle_services.gateway.futures.payloads import PayloadFiles
from twinkle_services.gateway.futures.rules import Bounds, Future, PayloadsNotShared
from twinkle_services.gateway.futures.sql import SqlFutureStore
from twinkle_services.gateway.futures.sql_peers import SqlPeers
from twinkle_services.gateway.store.database import Database
from twinkle_services.kit.errors import Cancelled, DomainError, QueueFull, ServiceUnreachable
from twinkle_services.kit.retry import Retry

LANE = 'ad-1'
LEASE = timedelta(seconds=30)
"""A lease that does not expire during a test, so that only a lost connection reveals a failed gateway."""


@dataclass
class SharedStorage:
    """A database and a folder of payloads that gateways share."""

    url: str
    folder: Path

    @asynccontextmanager
    async def gateway(
        self, recorder: Recorder | None = None, *, folder: Path | None = None, **fields: Any
    ) -> AsyncIterator[GatewayFutures]:
        """Run one more gateway until the block exits."""
        async with AsyncExitStack() as stack:
            database = await Database.open(self.url)
            stack.push_async_callback(database.close)
            payloads = PayloadFiles(folder or self.folder)
            stack.callback(payloads.close)
            peers = SqlPeers(
                database, self.url, payload_store_id=await payloads.store_id(), silence=3 * HEARTBEAT, lease=LEASE
            )
            stores = SqlFutureStore(database), payloads, peers
            yield await stack.enter_async_context(running_futures(recorder, stores=stores, **fields))


@pytest.fixture
def storage(postgres_database: str, tmp_path: Path) -> SharedStorage:
    """An empty database and a new folder of payloads."""
    return SharedStorage(postgres_database, tmp_path / 'payloads')


@pytest.fixture
async def pair(storage: SharedStorage) -> AsyncIterator[tuple[GatewayFutures, GatewayFutures]]:
    """Two gateways on one database."""
    async with storage.gateway() as first, storage.gateway() as second:
        yield first, second


async def submit_with_retries(gateway: GatewayFutures, key: str, **fields: Any) -> Future:
    """Submit a request, and repeat it while it is temporarily refused."""
    for attempt in range(100):
        try:
            return await gateway.submit(key, **fields)
        except (QueueFull, ServiceUnreachable):
            await Retry().back_off(attempt)
    raise AssertionError(f'{key} is still refused after 100 attempts')


def started_at(*gateways: GatewayFutures) -> list[str]:
    """Return the sorted keys of all futures that started at these gateways."""
    return sorted(key for gateway in gateways for key in gateway.recorder.started)


async def test_lane_runs_in_order_across_gateways(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """Futures of a lane that either gateway receives in any order run once and in order; both return the results."""
    order = random.Random(3).sample(range(24), 24)
    for gateway in pair:
        gateway.recorder.gate.clear()
    futures = {n: await pair[n % 2].submit(f'k{n}', lane=LANE, position=n) for n in order}
    waiting = [asyncio.create_task(gateway.outcome(future)) for gateway in pair for future in futures.values()]
    for gateway in pair:
        gateway.recorder.gate.set()
    assert await asyncio.gather(*waiting) == [f'k{n}'.encode()[::-1] for n in order] * 2
    executed = pair[0].recorder.started or pair[1].recorder.started
    assert executed == [f'k{n}' for n in range(24)]
    assert started_at(*pair) == sorted(executed)


async def test_idle_lane_continues_at_the_other_gateway(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """An idle lane moves to the gateway that receives its next future, and continues at the right position."""
    for position in range(9):
        gateway = pair[position // 2 % 2]
        assert await gateway.outcome(await gateway.submit(f'k{position}', lane=LANE, position=position))
    assert pair[0].recorder.started == ['k0', 'k1', 'k4', 'k5', 'k8']
    assert pair[1].recorder.started == ['k2', 'k3', 'k6', 'k7']


async def test_repeat_at_the_other_gateway_is_the_same_future(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """A request that is repeated at another gateway returns the same future, even after the future is finished."""
    pair[0].recorder.gate.clear()
    for key, lane in (('one', ''), ('two', LANE)):
        first = await pair[0].submit(key, lane=lane)
        repeated = await asyncio.gather(*(pair[1].submit(key, lane=lane) for _ in range(3)))
        assert {future.future_id for future in repeated} == {first.future_id}
    await pair[0].recorder.has_started(2)
    pair[0].recorder.gate.set()
    assert await pair[1].outcome(repeated[0]) == b'owt'
    assert (await pair[1].submit('two', lane=LANE)).is_finished
    assert (pair[0].recorder.started, pair[1].recorder.started) == (['one', 'two'], [])


async def test_futures_of_a_failed_gateway_run_at_the_other_one(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """A working gateway runs a failed gateway's futures once and in order; late writes have no effect."""
    failed, working = pair
    failed.recorder.gate.clear()
    futures = [await working.submit('free-b'), *[await failed.submit(f'k{n}', lane=LANE, position=n) for n in range(3)]]
    futures.append(await failed.submit('free-a'))
    await failed.recorder.has_started(2)
    await failed.stop_renewing()
    assert [await working.outcome(future) for future in futures] == [b'b-eerf', b'0k', b'1k', b'2k', b'a-eerf']
    assert [key for key in working.recorder.started if key.startswith('k')] == ['k0', 'k1', 'k2']
    stored = [await working.futures.wait(future.future_id, seconds=0) for future in futures]
    failed.recorder.gate.set()
    # The failed gateway's late outcomes change neither rows nor results, and it starts no more futures.
    await asyncio.wait_for(failed.futures.is_disowned.wait(), 20)
    assert [await working.futures.wait(future.future_id, seconds=0) for future in futures] == stored
    failed.renew_lease()
    assert [await failed.outcome(item) for item in stored] == [b'b-eerf', b'0k', b'1k', b'2k', b'a-eerf']
    assert failed.recorder.started == ['k0', 'free-a']


async def test_gateway_that_lost_its_lease_rejoins(storage: SharedStorage) -> None:
    """A live gateway that lost its lease drops its futures, rejoins, and accepts futures for the lane's new owner."""
    async with storage.gateway() as first, storage.gateway() as second:
        first.recorder.gate.clear()
        future = await first.submit('k0', lane=LANE)
        await first.recorder.has_started(1)
        with psycopg.connect(storage.url, autocommit=True) as connection:
            connection.execute('DELETE FROM gateways WHERE gateway_id = (SELECT min(gateway_id) FROM gateways)')
        # Either gateway may adopt the future: the second one, or the first one after it has joined under another id.
        await until(lambda: len(first.recorder.started + second.recorder.started) == 2)
        first.recorder.gate.set()
        assert await second.outcome(future) == b'0k'
        second.recorder.gate.clear()
        waiting = await second.submit('k1', lane=LANE, position=1)
        later = await submit_with_retries(first, 'k2', lane=LANE, position=2)
        second.recorder.gate.set()
        assert [await gateway.outcome(item) for gateway in (first, second) for item in (waiting, later)] == [
            b'1k',
            b'2k',
        ] * 2
        assert (first.recorder.started[0], second.recorder.started[-2:]) == ('k0', ['k1', 'k2'])
        assert sorted(first.recorder.started + second.recorder.started) == ['k0', 'k0', 'k1', 'k2']


async def test_futures_of_a_stopped_gateway_run_at_the_other_one(storage: SharedStorage) -> None:
    """The other gateway runs a stopped gateway's remaining futures before the stopped gateway's lease expires."""
    blocked = Recorder()
    blocked.gate.clear()
    async with storage.gateway() as remaining:
        async with storage.gateway(blocked) as stopped:
            futures = [await stopped.submit(f'k{n}', lane=LANE, position=n) for n in (1, 0)]
            await blocked.has_started(1)
        assert [await remaining.outcome(future) for future in futures] == [b'1k', b'0k']


async def test_starting_gateway_takes_no_futures_of_a_working_one(storage: SharedStorage) -> None:
    """Gateways that start and stop run none of another gateway's futures."""
    async with storage.gateway() as working:
        working.recorder.gate.clear()
        futures = [await working.submit(f'k{n}', lane=LANE, position=n) for n in range(3)] + [
            await working.submit('free')
        ]
        await working.recorder.has_started(2)
        others = list[str]()
        for _ in range(3):
            async with storage.gateway() as other:
                for count in range(5):
                    await other.outcome(await other.submit(f'own{count}'))
                others += [key for key in other.recorder.started if not key.startswith('own')]
        working.recorder.gate.set()
        assert [await working.outcome(future) for future in futures] == [b'0k', b'1k', b'2k', b'eerf']
        assert others == []
        assert len(working.recorder.started) == 4


async def test_cancellation_reaches_the_owner(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """A cancellation at one gateway cancels a future that runs or waits at the other gateway."""
    pair[0].recorder.gate.clear()
    running, waiting = await pair[0].submit('k0', lane=LANE), await pair[0].submit('k1', lane=LANE, position=1)
    await pair[0].recorder.has_started(1)
    for future in (waiting, running):
        await pair[1].futures.cancel(future.future_id)
    for future in (running, waiting):
        error = await pair[1].outcome(future)
        assert isinstance(error, DomainError)
        assert error.reason == Cancelled.reason


async def test_finished_future_of_a_topic_is_reported_at_the_other_gateway(
    pair: tuple[GatewayFutures, GatewayFutures],
) -> None:
    """A client that follows a topic at one gateway is notified of a future that finishes at the other gateway."""
    pair[0].recorder.gate.clear()
    future = await pair[0].submit('one', topic='topic-1')
    topics = pair[1].topics()
    read_task = asyncio.create_task(topics.finished_after('topic-1', cursor=0, seconds=20))
    await asyncio.sleep(0)
    pair[0].recorder.gate.set()
    finished, _ = await read_task
    assert [item.future_id for item in finished] == [future.future_id]


async def test_futures_of_another_gateway_count_until_they_finish(storage: SharedStorage) -> None:
    """A future that another gateway runs counts toward the accepting gateway's capacity until it is finished."""
    async with storage.gateway() as first, storage.gateway(capacity=Bounds(per_tenant=2, total=3)) as second:
        first.recorder.gate.clear()
        await first.submit('k0', lane=LANE)
        futures = [await second.submit(f'k{n}', lane=LANE, position=n) for n in (1, 2)]
        with pytest.raises(QueueFull):
            await second.submit('k3', lane=LANE, position=3)
        first.recorder.gate.set()
        assert [await second.outcome(future) for future in futures] == [b'1k', b'2k']
        assert await second.outcome(await submit_with_retries(second, 'k3', lane=LANE, position=3)) == b'3k'


async def test_gateway_with_another_payload_folder_does_not_start(storage: SharedStorage, tmp_path: Path) -> None:
    """A gateway with a different folder of payloads does not start while another gateway runs, but starts alone."""
    async with storage.gateway():
        with pytest.raises(PayloadsNotShared):
            async with storage.gateway(folder=tmp_path / 'other'):
                pass
    async with storage.gateway(folder=tmp_path / 'other'):
        pass
