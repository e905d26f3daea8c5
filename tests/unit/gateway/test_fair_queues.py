"""Each base model has places of its own: one that is busy, or away, takes none of the others'."""

import asyncio
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

from hypothesis import given
from hypothesis import strategies as st

from fixtures.futures import PLACES, Recorder, running_desk
from services.gateway.futures.rules import Future, FutureState
from services.gateway.sampling.fair_queue import Places
from services.gateway.sampling.fair_queues import MOST_QUEUES, FairQueues

START = datetime(2026, 5, 1, tzinfo=UTC)


def _future(key: str, base_model: str, *, tenant: str = 'alice') -> Future:
    return Future(
        future_id=f'fu-{key}',
        tenant_id=tenant,
        session_id='',
        kind='record',
        key=key,
        lane='',
        position=0,
        note='',
        fingerprint='',
        state=FutureState.WAITING,
        create_time=START,
        base_model=base_model,
    )


@given(
    arrivals=st.lists(
        st.tuples(st.sampled_from(['tiny', 'small', '']), st.sampled_from(['alice', 'bob'])), max_size=30
    ),
    moves=st.lists(st.integers(0, 5), max_size=60),
)
def test_places_are_counted_by_base_model_and_nothing_is_left_behind(
    arrivals: list[tuple[str, str]], moves: list[int]
) -> None:
    """Each base model has no more than its places, all futures begin, and empty queues are forgotten."""
    queues, running, order = FairQueues(Places(tenant=2, total=3)), list[Future](), iter(moves)
    for index, (base_model, tenant) in enumerate(arrivals):
        queues.add(_future(str(index), base_model, tenant=tenant))
    begun = 0
    while begun < len(arrivals):
        while (future := queues.take()) is not None:
            running.append(future)
            begun += 1
            alike = [item for item in running if item.base_model == future.base_model]
            assert len(alike) <= 3
            assert sum(item.tenant_id == future.tenant_id for item in alike) <= 2
        queues.give_back(running.pop(next(order, 0) % len(running)))
    for future in running:
        queues.give_back(future)
    assert len(queues) == 0


def test_future_of_a_base_model_waits_for_none_of_another() -> None:
    """All places of one are taken, and the other's first begins at once."""
    queues = FairQueues(Places(tenant=2, total=2))
    for index in range(10):
        queues.add(_future(str(index), 'tiny'))
    while queues.take() is not None:
        pass
    other = _future('other', 'small')
    queues.add(other)
    assert queues.take() == other


def test_dropped_future_is_not_taken_and_another_base_models_stays() -> None:
    """One that runs, or is not there, is no error."""
    queues = FairQueues(Places(tenant=2, total=2))
    first, second = _future('one', 'tiny'), _future('two', 'small')
    queues.add(first)
    queues.add(second)
    assert queues.drop(first)
    assert not queues.drop(first)
    assert queues.take() == second
    assert not queues.drop(second)
    queues.give_back(second)
    assert len(queues) == 0


def test_names_that_nobody_serves_make_no_endless_queues() -> None:
    """Beyond a bound they share one; and what is in it finds its way out."""
    queues = FairQueues(Places(tenant=1, total=1))
    futures = [_future(str(index), f'made-up-{index}') for index in range(2 * MOST_QUEUES)]
    for future in futures:
        queues.add(future)
    assert len(queues) <= MOST_QUEUES + 1
    taken: set[str] = set()
    while (future := queues.take()) is not None:
        taken.add(future.future_id)
        queues.give_back(future)
    assert taken == {future.future_id for future in futures}


@dataclass
class _HalfAway(Recorder):
    """Never ends a future of the base model 'away'."""

    never: asyncio.Event = field(default_factory=asyncio.Event)

    async def __call__(self, future: Future, payload: bytes) -> bytes:
        if future.base_model == 'away':
            self.begun.append(future.key)
            await self.never.wait()
        return await super().__call__(future, payload)


async def test_base_model_that_is_away_starves_no_other() -> None:
    """With all of its places taken for ever, ordered and not, another base model's requests are carried out."""
    for lanes in (True, False):
        async with running_desk(_HalfAway()) as desk:
            for index in range(3 * PLACES.tenant):
                await desk.submit(f'away-{index}', lane=f'ad-{index}' if lanes else '', base_model='away')
            for index in range(3):
                lane = 'ad-here' if lanes else ''
                future = await desk.submit(f'{index}', lane=lane, position=index, base_model='here')
                assert await desk.outcome(future) == f'{index}'.encode()


def test_base_model_is_no_part_of_what_was_asked() -> None:
    """A repeat finds its future whether or not the base model was known the first time."""
    future = _future('one', '')
    replace(future, base_model='tiny').check_repeat(future.fingerprint)
