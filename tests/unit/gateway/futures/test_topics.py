"""Ends of a topic come in pages, from any gateway, and none is lost."""

from collections import Counter
from datetime import timedelta
from itertools import cycle

import pytest

from fixtures.futures import GatewayFutures, running_futures
from services.gateway.futures.rules import Future, FutureRequest

PAGE = 1000
STEP = timedelta(milliseconds=20)
"""Time between two ends; the overlap of two reads covers a hundred of them."""
CLOSE = 101


def _end_some(gateway: GatewayFutures, count: int, *, name: str = 'f', step: timedelta = STEP) -> list[str]:
    """Finish some of alice's futures of the topic, and return their ids in that order."""
    ids = list[str]()
    for number in range(count):
        request = FutureRequest(kind='k', key=f'{name}-{number}', payload=b'', session_id='', topic='talk')
        accepted = Future.accepted(request, tenant_id='alice', moment=gateway.clock.now())
        gateway.clock.advance(step)
        gateway.store.futures[accepted.future_id] = accepted.done(moment=gateway.clock.now())
        ids.append(accepted.future_id)
    return ids


async def test_ends_come_in_pages_and_each_once() -> None:
    """Responses have at most a page of ends, in order and each once, and a later end is in a later response."""
    async with running_futures() as gateway:
        ids, topics, received, cursor = _end_some(gateway, 2 * PAGE + 500), gateway.topics(), list[str](), 0
        while len(received) < len(ids):
            ended, following = await topics.ended_after('talk', cursor=cursor, seconds=0)
            assert 0 < len(ended) <= PAGE
            assert following > cursor
            received, cursor = received + [future.future_id for future in ended], following
        assert received == ids
        assert await topics.ended_after('talk', cursor=cursor, seconds=0) == ([], cursor)
        late = _end_some(gateway, 1, name='late')
        ended, _ = await topics.ended_after('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == late


@pytest.mark.parametrize('step', [STEP, timedelta(0), timedelta(microseconds=1)])
async def test_lost_responses_and_other_gateways_lose_no_end(step: timedelta) -> None:
    """All ends arrive in bounded pages when two gateways alternate and every third response is lost."""
    async with running_futures() as gateway:
        count = 2 * PAGE + 500 if step else PAGE - 1
        ids, received, cursor = _end_some(gateway, count, step=step), Counter[str](), 0
        gateways = cycle([gateway.topics(), gateway.topics()])
        for turn, topics in zip(range(20), gateways, strict=False):
            ended, following = await topics.ended_after('talk', cursor=cursor, seconds=0)
            assert len(ended) <= PAGE + (CLOSE if step == STEP else len(ids))
            if turn % 3:
                received.update(future.future_id for future in ended)
                cursor = following
        assert set(received) == set(ids)


async def test_end_that_is_stored_late_is_returned() -> None:
    """An end whose time is before the cursor, because of another gateway's slow clock, is still returned."""
    async with running_futures() as gateway:
        topics = gateway.topics()
        ids = _end_some(gateway, 3)
        late = gateway.store.futures.pop(ids[1])
        ended, cursor = await topics.ended_after('talk', cursor=0, seconds=0)
        assert [future.future_id for future in ended] == [ids[0], ids[2]]
        gateway.store.futures[late.future_id] = late
        ended, after = await topics.ended_after('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == [ids[1]]
        assert after > cursor
        assert await topics.ended_after('talk', cursor=after, seconds=0) == ([], after)
