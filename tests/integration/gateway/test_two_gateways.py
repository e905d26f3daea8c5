"""Two gateways on one PostgreSQL database: clients need not know which of them they talk to, and either may die."""

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

from fixtures.futures import HEARTBEAT, GatewayFutures, Recorder, running_futures
from services.gateway.futures.payloads import PayloadFiles
from services.gateway.futures.retry import Retry
from services.gateway.futures.rules import Bounds, Future, PayloadsNotShared
from services.gateway.futures.sql import SqlFutureStore
from services.gateway.futures.sql_peers import SqlPeers
from services.gateway.store.database import Database
from services.kit.errors import Cancelled, DomainError, QueueFull, ServiceUnreachable

LANE = 'ad-1'
LEASE = timedelta(seconds=30)
"""So long that only a connection that is gone tells of a death."""


@dataclass
class Town:
    """A database and a folder, and gateways on them."""

    url: str
    folder: Path

    @asynccontextmanager
    async def gateway(
        self, recorder: Recorder | None = None, *, folder: Path | None = None, **fields: Any
    ) -> AsyncIterator[GatewayFutures]:
        """Run one more until the block ends."""
        async with AsyncExitStack() as stack:
            database = await Database.open(self.url)
            stack.push_async_callback(database.close)
            payloads = PayloadFiles(folder or self.folder, is_synced=False)
            stack.callback(payloads.close)
            peers = SqlPeers(
                database, self.url, payload_store_id=await payloads.store_id(), silence=3 * HEARTBEAT, lease=LEASE
            )
            stores = SqlFutureStore(database), payloads, peers
            yield await stack.enter_async_context(running_futures(recorder, stores=stores, **fields))


@pytest.fixture
def town(postgres_database: str, tmp_path: Path) -> Town:
    """An empty database."""
    return Town(postgres_database, tmp_path / 'payloads')


@pytest.fixture
async def pair(town: Town) -> AsyncIterator[tuple[GatewayFutures, GatewayFutures]]:
    """Two gateways on one database."""
    async with town.gateway() as first, town.gateway() as second:
        yield first, second


async def submit_patiently(gateway: GatewayFutures, key: str, **fields: Any) -> Future:
    """Submit as clients do, again where it is refused for now."""
    for attempt in range(100):
        try:
            return await gateway.submit(key, **fields)
        except (QueueFull, ServiceUnreachable):
            await Retry().back_off(attempt)
    raise AssertionError(f'{key} is refused for good')


def begun(*gateways: GatewayFutures) -> list[str]:
    """Return the keys of all that began anywhere."""
    return sorted(key for gateway in gateways for key in gateway.recorder.started)


async def test_lane_is_one_whichever_gateway_its_parts_come_to(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """Sent in any order to either, each is carried out once, one after the other, and told at both."""
    order = random.Random(3).sample(range(24), 24)
    for gateway in pair:
        gateway.recorder.gate.clear()
    futures = {n: await pair[n % 2].submit(f'k{n}', lane=LANE, position=n) for n in order}
    waiting = [asyncio.create_task(gateway.outcome(future)) for gateway in pair for future in futures.values()]
    for gateway in pair:
        gateway.recorder.gate.set()
    assert await asyncio.gather(*waiting) == [f'k{n}'.encode()[::-1] for n in order] * 2
    ran = pair[0].recorder.started or pair[1].recorder.started
    assert ran == [f'k{n}' for n in range(24)]
    assert begun(*pair) == sorted(ran)


async def test_lane_that_fell_idle_goes_on_at_the_other_gateway(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """Who has a lane is no matter once nothing waits in it, and each knows where it goes on."""
    for position in range(9):
        gateway = pair[position // 2 % 2]
        assert await gateway.outcome(await gateway.submit(f'k{position}', lane=LANE, position=position))
    assert pair[0].recorder.started == ['k0', 'k1', 'k4', 'k5', 'k8']
    assert pair[1].recorder.started == ['k2', 'k3', 'k6', 'k7']


async def test_repeat_at_the_other_gateway_is_the_same_future(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """While it runs and after it is finished, of a lane and of none."""
    pair[0].recorder.gate.clear()
    for key, lane in (('one', ''), ('two', LANE)):
        first = await pair[0].submit(key, lane=lane)
        again = await asyncio.gather(*(pair[1].submit(key, lane=lane) for _ in range(3)))
        assert {future.future_id for future in again} == {first.future_id}
    await pair[0].recorder.has_started(2)
    pair[0].recorder.gate.set()
    assert await pair[1].outcome(again[0]) == b'owt'
    assert (await pair[1].submit('two', lane=LANE)).is_finished
    assert (pair[0].recorder.started, pair[1].recorder.started) == (['one', 'two'], [])


async def test_what_a_dead_gateway_left_is_carried_out_once_more(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """All of it and in order; what the dead one still does has no effect, and it comes back with nothing to do."""
    dead, alive = pair
    dead.recorder.gate.clear()
    futures = [await alive.submit('free-b'), *[await dead.submit(f'k{n}', lane=LANE, position=n) for n in range(3)]]
    futures.append(await dead.submit('free-a'))
    await dead.recorder.has_started(2)
    await dead.fall_silent()
    assert [await alive.outcome(future) for future in futures] == [b'b-eerf', b'0k', b'1k', b'2k', b'a-eerf']
    assert [key for key in alive.recorder.started if key.startswith('k')] == ['k0', 'k1', 'k2']
    kept = [await alive.futures.wait(future.future_id, seconds=0) for future in futures]
    dead.recorder.gate.set()
    # Its late ends change neither rows nor results, and it begins nothing after them.
    await asyncio.wait_for(dead.futures.is_disowned.wait(), 20)
    assert [await alive.futures.wait(future.future_id, seconds=0) for future in futures] == kept
    dead.renew_lease()
    assert [await dead.outcome(item) for item in kept] == [b'b-eerf', b'0k', b'1k', b'2k', b'a-eerf']
    assert dead.recorder.started == ['k0', 'free-a']


async def test_gateway_that_lost_its_place_joins_again(town: Town) -> None:
    """Taken for dead while it lived, it drops what it had, and accepts again for the one who has the lane now."""
    async with town.gateway() as first, town.gateway() as second:
        first.recorder.gate.clear()
        future = await first.submit('k0', lane=LANE)
        await first.recorder.has_started(1)
        with psycopg.connect(town.url, autocommit=True) as connection:
            connection.execute('DELETE FROM gateways WHERE gateway_id = (SELECT min(gateway_id) FROM gateways)')
        assert await second.outcome(future) == b'0k'
        first.recorder.gate.set()
        second.recorder.gate.clear()
        waits = await second.submit('k1', lane=LANE, position=1)
        later = await submit_patiently(first, 'k2', lane=LANE, position=2)
        second.recorder.gate.set()
        assert [await gateway.outcome(item) for gateway in (first, second) for item in (waits, later)] == [
            b'1k',
            b'2k',
        ] * 2
        assert (first.recorder.started, second.recorder.started) == (['k0'], ['k0', 'k1', 'k2'])


async def test_gateway_that_stops_hands_over_at_once(town: Town) -> None:
    """Nobody waits for a lease: what it had not begun runs at the other before long."""
    stuck = Recorder()
    stuck.gate.clear()
    async with town.gateway() as stays:
        async with town.gateway(stuck) as leaves:
            futures = [await leaves.submit(f'k{n}', lane=LANE, position=n) for n in (1, 0)]
            await stuck.has_started(1)
        assert [await stays.outcome(future) for future in futures] == [b'1k', b'0k']


async def test_gateway_that_starts_takes_nothing_from_one_that_works(town: Town) -> None:
    """However often another one is started and stopped beside it, nothing runs twice."""
    async with town.gateway() as works:
        works.recorder.gate.clear()
        futures = [await works.submit(f'k{n}', lane=LANE, position=n) for n in range(3)] + [await works.submit('free')]
        await works.recorder.has_started(2)
        others = list[str]()
        for _ in range(3):
            async with town.gateway() as other:
                for count in range(5):
                    await other.outcome(await other.submit(f'own{count}'))
                others += [key for key in other.recorder.started if not key.startswith('own')]
        works.recorder.gate.set()
        assert [await works.outcome(future) for future in futures] == [b'0k', b'1k', b'2k', b'eerf']
        assert others == []
        assert len(works.recorder.started) == 4


async def test_cancellation_reaches_who_carries_it_out(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """Asked for at one gateway, a future that runs or waits at the other one ends."""
    pair[0].recorder.gate.clear()
    running, behind = await pair[0].submit('k0', lane=LANE), await pair[0].submit('k1', lane=LANE, position=1)
    await pair[0].recorder.has_started(1)
    for future in (behind, running):
        await pair[1].futures.cancel(future.future_id)
    for future in (running, behind):
        error = await pair[1].outcome(future)
        assert isinstance(error, DomainError)
        assert error.reason == Cancelled.reason


async def test_ends_of_a_topic_are_heard_at_the_other_gateway(pair: tuple[GatewayFutures, GatewayFutures]) -> None:
    """Who follows a topic there is woken by an end here."""
    pair[0].recorder.gate.clear()
    future = await pair[0].submit('one', topic='talk')
    topics = pair[1].topics()
    reading = asyncio.create_task(topics.ended_after('talk', cursor=0, seconds=20))
    await asyncio.sleep(0)
    pair[0].recorder.gate.set()
    ended, _ = await reading
    assert [item.future_id for item in ended] == [future.future_id]


async def test_what_is_carried_out_elsewhere_takes_room_here_until_it_ends(town: Town) -> None:
    """What a gateway accepts is bounded whoever carries it out, and there is room again once it is finished."""
    async with town.gateway() as first, town.gateway(capacity=Bounds(per_tenant=2, total=3)) as second:
        first.recorder.gate.clear()
        await first.submit('k0', lane=LANE)
        futures = [await second.submit(f'k{n}', lane=LANE, position=n) for n in (1, 2)]
        with pytest.raises(QueueFull):
            await second.submit('k3', lane=LANE, position=3)
        first.recorder.gate.set()
        assert [await second.outcome(future) for future in futures] == [b'1k', b'2k']
        assert await second.outcome(await submit_patiently(second, 'k3', lane=LANE, position=3)) == b'3k'


async def test_other_payloads_are_refused_at_the_start(town: Town, tmp_path: Path) -> None:
    """A gateway whose folder is another one does not begin beside one that works, and does where it is alone."""
    async with town.gateway():
        with pytest.raises(PayloadsNotShared):
            async with town.gateway(folder=tmp_path / 'other'):
                pass
    async with town.gateway(folder=tmp_path / 'other'):
        pass
