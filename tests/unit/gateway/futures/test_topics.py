"""Any gateway returns all finished futures of a topic, in pages."""

from collections import Counter
from datetime import timedelta
from itertools import cycle

import pytest

from fixtures.futures import GatewayFutures, running_futures
from twinkle_services.gateway.futures.rules import Future, FutureRequest

PAGE = 1000
"""Maximum number of futures in a page."""
STEP = timedelta(milliseconds=20)
"""Time between two finished futures."""
OVERLAP = 101
"""Largest number of futures that a read returns again. Two reads overlap by a hundred steps."""


def _finish_some(gateway: GatewayFutures, count: int, *, name: str = 'f', step: timedelta = STEP) -> list[str]:
    """Finish `count` futures of alice in the topic, and return their ids in the order of their finish times."""
    ids = list[str]()
    for number in range(count):
        request = FutureRequest(kind='k', key=f'{name}-{number}', payload=b'', session_id='', topic='talk')
        accepted = Future.accepted(request, tenant_id='alice', moment=gateway.clock.now())
        gateway.clock.advance(step)
        gateway.store.futures[accepted.future_id] = accepted.done(moment=gateway.clock.now())
        ids.append(accepted.future_id)
    return ids


async def test_finished_futures_are_returned_in_pages_and_once() -> None:
    """Each response has at most one page of futures, in order and without repeats, even if more finish later."""
    async with running_futures() as gateway:
        ids, topics, received, cursor = _finish_some(gateway, 2 * PAGE + 500), gateway.topics(), list[str](), 0
        while len(received) < len(ids):
            ended, next_cursor = await topics.finished_after('talk', cursor=cursor, seconds=0)
            assert 0 < len(ended) <= PAGE
            assert next_cursor > cursor
            received, cursor = received + [future.future_id for future in ended], next_cursor
        assert received == ids
        assert await topics.finished_after('talk', cursor=cursor, seconds=0) == ([], cursor)
        late = _finish_some(gateway, 1, name='late')
        ended, _ = await topics.finished_after('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == late


@pytest.mark.parametrize('step', [STEP, timedelta(0), timedelta(microseconds=1)])
async def test_lost_responses_and_alternating_gateways_lose_no_future(step: timedelta) -> None:
    """All finished futures arrive in bounded pages although two gateways alternate and every third response is lost."""
    async with running_futures() as gateway:
        count = 2 * PAGE + 500 if step else PAGE - 1
        ids, received, cursor = _finish_some(gateway, count, step=step), Counter[str](), 0
        gateways = cycle([gateway.topics(), gateway.topics()])
        for turn, topics in zip(range(20), gateways, strict=False):
            ended, next_cursor = await topics.finished_after('talk', cursor=cursor, seconds=0)
            assert len(ended) <= PAGE + (OVERLAP if step == STEP else len(ids))
            if turn % 3:
                received.update(future.future_id for future in ended)
                cursor = next_cursor
        assert set(received) == set(ids)


async def test_future_that_is_stored_late_is_returned() -> None:
    """A future whose finish time is before the cursor, because of another gateway's slow clock, is still returned."""
    async with running_futures() as gateway:
        topics = gateway.topics()
        ids = _finish_some(gateway, 3)
        late = gateway.store.futures.pop(ids[1])
        ended, cursor = await topics.finished_after('talk', cursor=0, seconds=0)
        assert [future.future_id for future in ended] == [ids[0], ids[2]]
        gateway.store.futures[late.future_id] = late
        ended, after = await topics.finished_after('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == [ids[1]]
        assert after > cursor
        assert await topics.finished_after('talk', cursor=after, seconds=0) == ([], after)
