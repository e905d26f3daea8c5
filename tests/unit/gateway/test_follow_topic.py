"""Ends of a topic are told a part at a time, at whatever gateway somebody asks, and none is lost."""

from collections import Counter
from datetime import timedelta
from itertools import cycle

import pytest

from fixtures.futures import Desk, running_desk
from services.gateway.futures.follow_topic import FollowTopic
from services.gateway.futures.rules import Future, FutureRequest

PAGE = 1000
STEP = timedelta(milliseconds=20)
"""Between two ends; a hundred of them are as close together as clocks and transactions may be apart."""
CLOSE = 101


def _end_some(desk: Desk, count: int, *, name: str = 'f', step: timedelta = STEP) -> list[str]:
    """Have some of alice's futures of the topic finished, and return their ids in that order."""
    ids = list[str]()
    for number in range(count):
        order = FutureRequest(kind='k', key=f'{name}-{number}', payload=b'', session_id='', topic='talk')
        accepted = Future.accepted(order, tenant_id='alice', moment=desk.clock.now())
        desk.clock.advance(step)
        desk.store.futures[accepted.future_id] = accepted.done(moment=desk.clock.now())
        ids.append(accepted.future_id)
    return ids


async def test_many_ends_come_in_parts_and_each_once() -> None:
    """No answer has more than a page, all are told in their order, and what ends later is told then."""
    async with running_desk() as desk:
        ids, follow, told, cursor = _end_some(desk, 2 * PAGE + 500), FollowTopic(desk.world), list[str](), 0
        while len(told) < len(ids):
            ended, following = await follow('talk', cursor=cursor, seconds=0)
            assert 0 < len(ended) <= PAGE
            assert following > cursor
            told, cursor = told + [future.future_id for future in ended], following
        assert told == ids
        assert await follow('talk', cursor=cursor, seconds=0) == ([], cursor)
        late = _end_some(desk, 1, name='late')
        ended, _ = await follow('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == late


@pytest.mark.parametrize('step', [STEP, timedelta(0), timedelta(microseconds=1)])
async def test_parts_may_be_asked_of_any_gateway_and_lost_on_the_way(step: timedelta) -> None:
    """By turns at two of them, with every third answer lost, all are told, in bounded parts."""
    async with running_desk() as desk:
        count = 2 * PAGE + 500 if step else PAGE - 1
        ids, told, cursor = _end_some(desk, count, step=step), Counter[str](), 0
        gateways = cycle([FollowTopic(desk.world), FollowTopic(desk.world)])
        for turn, follow in zip(range(20), gateways, strict=False):
            ended, following = await follow('talk', cursor=cursor, seconds=0)
            assert len(ended) <= PAGE + (CLOSE if step == STEP else len(ids))
            if turn % 3:
                told.update(future.future_id for future in ended)
                cursor = following
        assert set(told) == set(ids)


async def test_end_that_is_kept_late_is_told() -> None:
    """One whose moment is before the cursor, because another gateway's clock is behind, is told all the same."""
    async with running_desk() as desk:
        follow = FollowTopic(desk.world)
        ids = _end_some(desk, 3)
        late = desk.store.futures.pop(ids[1])
        ended, cursor = await follow('talk', cursor=0, seconds=0)
        assert [future.future_id for future in ended] == [ids[0], ids[2]]
        desk.store.futures[late.future_id] = late
        ended, after = await follow('talk', cursor=cursor, seconds=0)
        assert [future.future_id for future in ended] == [ids[1]]
        assert after > cursor
        assert await follow('talk', cursor=after, seconds=0) == ([], after)
