"""The scheduler between tenants: nothing starves, is lost or doubled, and tokens are shared by weight."""

import pickle
import random
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import count

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from services.model.domain.scheduler import QUICK_RUN, ReadyVerb, Scheduler

BUDGET = 1024
KEYS = ('train', 'evaluate', None)


def work(adapter_id: str, tokens: int, *, tenant: str = 'alice', key: str | None = 'train') -> ReadyVerb:
    """Return a work of one adapter."""
    return ReadyVerb(adapter_id=adapter_id, tenant_id=tenant, token_count=tokens, batch_key=key)


def drained(scheduler: Scheduler) -> list[list[ReadyVerb]]:
    """Return every batch until nothing waits."""
    batches: list[list[ReadyVerb]] = []
    while batch := scheduler.next_batch():
        batches.append(batch)
    return batches


def ids(batch: Sequence[ReadyVerb]) -> list[str]:
    """Return whose works they are."""
    return [item.adapter_id for item in batch]


works = st.builds(
    ReadyVerb,
    adapter_id=st.integers(0, 40).map('a{}'.format),
    tenant_id=st.sampled_from(['alice', 'bob', 'carol', 'dave']),
    token_count=st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 5000)),
    batch_key=st.sampled_from(KEYS),
)
bounds = st.one_of(st.none(), st.integers(0, 2000))
moves = st.lists(st.one_of(works, st.just('next'), st.integers(0, 40).map('a{}'.format), bounds), max_size=200)
"""A work is added, 'next' takes a batch, an adapter's id cancels, a number or None bounds what comes."""


@settings(max_examples=100, deadline=None)
@given(moves, st.dictionaries(st.sampled_from(['alice', 'bob']), st.floats(0.01, 100.0)))
def test_nothing_is_lost_or_doubled_whatever_comes(
    moves: list[ReadyVerb | str | int | None], weights: dict[str, float]
) -> None:
    """Each work added is handed out once or cancelled once, and every batch keeps the rules."""
    scheduler = Scheduler(batch_tokens=BUDGET, weights=weights)
    waiting: dict[str, ReadyVerb] = {}
    for move in [*moves, *(['next'] * len(moves))]:
        if move is None or isinstance(move, int):
            scheduler.bound(move)
        elif isinstance(move, ReadyVerb):
            if move.adapter_id not in waiting:
                scheduler.add(move)
                waiting[move.adapter_id] = move
        elif move == 'next':
            batch = scheduler.next_batch()
            assert bool(batch) == bool(waiting)
            for item in batch:
                assert waiting.pop(item.adapter_id) is item
            check_batch(batch)
        else:
            assert scheduler.remove(move) is waiting.pop(move, None)
        assert len(scheduler) == len(waiting)
        assert scheduler.token_count == sum(item.token_count for item in waiting.values())
    assert not waiting


def check_batch(batch: Sequence[ReadyVerb]) -> None:
    """Assert that works may run together and fit."""
    if len(batch) < 2:
        return
    assert len({item.batch_key for item in batch}) == 1
    assert batch[0].batch_key is not None
    assert all(item.token_count for item in batch)
    passes = -(-batch[0].token_count // BUDGET)
    assert sum(item.token_count for item in batch) <= passes * BUDGET


def test_works_of_one_kind_fill_the_budget_and_no_more() -> None:
    """Sixteen small batches of sixteen adapters are one; the seventeenth waits."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index in range(17):
        scheduler.add(work(f'a{index}', 64))
    assert [len(batch) for batch in drained(scheduler)] == [16, 1]


def test_kinds_are_never_mixed_and_some_run_alone() -> None:
    """Training, evaluation, and what cannot share a pass are three batches and more."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index, key in enumerate(['train', 'evaluate', None, 'train', 'evaluate', None]):
        scheduler.add(work(f'a{index}', 10, key=key))
    assert [ids(batch) for batch in drained(scheduler)] == [['a0', 'a3'], ['a1', 'a4'], ['a2'], ['a5']]


def test_a_large_work_runs_with_what_fits_beside_it() -> None:
    """What is beyond the budget takes passes of its own, and shares the rest of the last one."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(work('large', 5 * BUDGET - 100))
    scheduler.add(work('fits', 100, tenant='bob'))
    scheduler.add(work('waits', 100, tenant='carol'))
    assert ids(scheduler.next_batch()) == ['large', 'fits']
    scheduler.add(work('full', 2 * BUDGET))
    assert ids(scheduler.next_batch()) == ['waits']
    assert ids(scheduler.next_batch()) == ['full']


def test_quick_works_go_first_but_not_for_ever() -> None:
    """A step does not wait behind batches; steps without end do not hold batches up."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(work('batch', 64))
    for index in range(QUICK_RUN + 10):
        scheduler.add(work(f'q{index}', 0))
    order = [item.adapter_id for batch in drained(scheduler) for item in batch]
    assert order.index('batch') == QUICK_RUN


def test_quick_works_of_tenants_take_turns() -> None:
    """One step of a tenant comes second, however many another tenant has."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index in range(50):
        scheduler.add(work(f'a{index}', 0))
    scheduler.add(work('b', 0, tenant='bob'))
    assert [ids(scheduler.next_batch()) for _ in range(3)] == [['a0'], ['b'], ['a1']]


def test_one_adapter_has_one_work_here() -> None:
    """A second is a defect of whoever adds it."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(work('a', 1))
    with pytest.raises(ValueError, match='already'):
        scheduler.add(work('a', 0))


class Crowd:
    """Adapters that each have their next work ready as soon as the last one was handed out."""

    def __init__(self, scheduler: Scheduler, sizes: dict[str, Iterator[int]], *, adapters: dict[str, int]) -> None:
        self.scheduler = scheduler
        self.sizes = sizes
        self.served: Counter[str] = Counter()
        self.turns: list[str] = []
        for tenant, number in adapters.items():
            for index in range(number):
                self.add(f'{tenant}-{index}', tenant)

    def add(self, adapter_id: str, tenant: str) -> None:
        """Give an adapter its next work."""
        self.scheduler.add(work(adapter_id, next(self.sizes[tenant]), tenant=tenant))

    def play(self, batches: int) -> None:
        """Take batches."""
        for _ in range(batches):
            batch = self.scheduler.next_batch()
            for item in batch:
                self.served[item.tenant_id] += item.token_count
                self.turns.append(item.adapter_id)
            for item in batch:
                if item.adapter_id != 'guest':
                    self.add(item.adapter_id, item.tenant_id)


def sizes(seed: int, low: int, high: int) -> Iterator[int]:
    """Draw sizes of works for ever."""
    rng = random.Random(seed)
    return (rng.randint(low, high) for _ in count())


@pytest.mark.parametrize('seed', range(8))
def test_backlogged_tenants_share_tokens_by_weight(seed: int) -> None:
    """Whatever the sizes of their works, tenants that always have more get their weights within a tenth."""
    rng = random.Random(seed)
    weights = {f't{index}': rng.choice([0.5, 1.0, 2.0, 3.0]) for index in range(4)}
    ranges = {tenant: rng.choice([(10, 64), (200, 900), (600, 600), (500, 4000)]) for tenant in weights}
    crowd = Crowd(
        Scheduler(batch_tokens=BUDGET, weights=weights),
        {tenant: sizes(seed, *ranges[tenant]) for tenant in weights},
        # Enough adapters that no tenant's queue runs empty within a batch.
        adapters=dict.fromkeys(weights, 110),
    )
    crowd.play(1500)
    shares = [crowd.served[tenant] / weight for tenant, weight in weights.items()]
    assert max(shares) <= 1.1 * min(shares)


def test_a_thousand_adapters_of_one_tenant_do_not_starve_one_of_another() -> None:
    """Tenants count, not adapters: the single adapter is in every batch or every other."""
    crowd = Crowd(
        Scheduler(batch_tokens=BUDGET),
        {'many': sizes(1, 100, 100), 'one': sizes(2, 100, 100)},
        adapters={'many': 1000, 'one': 1},
    )
    crowd.play(300)
    assert crowd.turns.count('one-0') >= 150


def test_adapters_of_a_tenant_take_turns() -> None:
    """Round-robin: between two works of an adapter each other one is served once."""
    crowd = Crowd(Scheduler(batch_tokens=BUDGET), {'many': sizes(1, 1, 400)}, adapters={'many': 50})
    crowd.play(400)
    turns = Counter(crowd.turns)
    assert max(turns.values()) - min(turns.values()) <= 1


def test_a_single_adapter_with_large_works_pays_for_them() -> None:
    """What a tenant spent is not forgotten while it has nothing waiting for a moment."""
    crowd = Crowd(
        Scheduler(batch_tokens=BUDGET),
        {'many': sizes(1, 128, 128), 'one': sizes(2, 10_000, 10_000)},
        adapters={'many': 100, 'one': 1},
    )
    crowd.play(1000)
    assert crowd.served['one'] <= 1.1 * crowd.served['many']


@pytest.mark.parametrize('seed', range(20))
def test_every_work_is_served_within_a_bound(seed: int) -> None:
    """However hard the others press, a work runs within batches that its tenant's share explains."""
    rng = random.Random(seed)
    tenants = {f't{index}': rng.randint(1, 30) for index in range(rng.randint(2, 6))}
    crowd = Crowd(
        Scheduler(batch_tokens=BUDGET),
        {tenant: sizes(seed + index, 0, rng.choice([50, 1500])) for index, tenant in enumerate(tenants)},
        adapters=tenants,
    )
    crowd.play(rng.randint(50, 400))
    crowd.scheduler.add(work('late', 700, tenant='late', key=rng.choice(KEYS)))
    batches: list[list[ReadyVerb]] = []
    while 'late' not in ids(batch := crowd.scheduler.next_batch()):
        batches.append(batch)
        for item in batch:
            crowd.add(item.adapter_id, item.tenant_id)
    heavy = sum(bool(batch[0].token_count) for batch in batches)
    # Each of the others may lead one batch before; each batch may come after a run of quick works.
    assert heavy <= len(tenants)
    assert len(batches) - heavy <= QUICK_RUN * (heavy + 1)


@settings(max_examples=80, deadline=None)
@given(st.lists(works, max_size=60, unique_by=lambda item: item.adapter_id), st.integers(0, 59))
def test_the_place_told_is_the_place_had(items: list[ReadyVerb], chosen: int) -> None:
    """If nothing else comes, exactly so much runs first as was told; asking changes nothing."""
    scheduler, twin = Scheduler(batch_tokens=BUDGET), Scheduler(batch_tokens=BUDGET)
    for item in items:
        scheduler.add(item)
        twin.add(item)
    target = items[chosen % len(items)].adapter_id if items else 'a0'
    ahead = scheduler.ahead_of(target)
    batches = drained(scheduler)
    assert [ids(batch) for batch in batches] == [ids(batch) for batch in drained(twin)]
    if ahead is None:
        assert not items
        return
    place = next(index for index, batch in enumerate(batches) if target in ids(batch))
    before = batches[:place]
    heavy = [item for batch in before for item in batch if item.token_count]
    assert (ahead.batch_count + ahead.quick_count, ahead.heavy_count) == (len(before), len(heavy))
    assert ahead.token_count == sum(item.token_count for item in heavy)


def test_tenants_that_are_gone_leave_nothing() -> None:
    """While one tenant always has work, a thousand others that come once take no memory for long."""
    crowd = Crowd(Scheduler(batch_tokens=BUDGET), {'many': sizes(1, 400, 600)}, adapters={'many': 8})
    before = len(pickle.dumps(crowd.scheduler))
    for index in range(1000):
        crowd.scheduler.add(work('guest', 500, tenant=f't{index}'))
        while crowd.scheduler.ahead_of('guest') is not None:
            crowd.play(1)
    crowd.play(10)
    assert len(pickle.dumps(crowd.scheduler)) < 2 * before


def test_unequal_demand_is_shared_equally_where_batches_are_bounded() -> None:
    """Adapters that come back as soon as they were served: full batches follow demand, bounded ones do not."""
    adapters = {'many': 26, 'more': 19, 'some': 13, 'few': 6}
    served = {bound: served_of(adapters, bound) for bound in (None, 128)}
    assert served[None]['many'] == pytest.approx(26 / 64, abs=0.01)
    assert all(part == pytest.approx(0.25, abs=0.01) for part in served[128].values())


def served_of(adapters: dict[str, int], bound: int | None) -> dict[str, float]:
    """Return the part of each tenant in 500 batches; who was served is back one batch later."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.bound(bound)
    away = [work(f'{tenant}-{place}', 16, tenant=tenant) for tenant, most in adapters.items() for place in range(most)]
    counts: Counter[str] = Counter()
    for _ in range(500):
        for item in away:
            scheduler.add(item)
        away = scheduler.next_batch()
        counts.update(item.tenant_id for item in away)
    return {tenant: count / counts.total() for tenant, count in counts.items()}


def test_a_bound_is_between_a_few_examples_and_what_the_engine_takes() -> None:
    """However slow or quick the device: works still share a pass, and a pass is never too large."""
    for bound, expected in ((0, 8), (128, 8), (500, 31), (10**9, 64), (None, 64)):
        scheduler = Scheduler(batch_tokens=BUDGET)
        scheduler.bound(bound)
        for number in range(100):
            scheduler.add(work(f'a{number}', 16))
        assert len(scheduler.next_batch()) == expected


def test_who_comes_after_passes_became_small_does_not_wait_for_what_others_saved() -> None:
    """Credits of large passes do not keep a newcomer away once passes are small."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for number in range(60):
        scheduler.add(work(f'early-{number}', 16))
    scheduler.next_batch()
    scheduler.bound(128)
    for number in range(60):
        scheduler.add(work(f'early-{number}', 16))
        scheduler.add(work(f'late-{number}', 16, tenant='bob'))
    counts: Counter[str] = Counter()
    for _ in range(4):
        counts.update(item.tenant_id for item in scheduler.next_batch())
    assert abs(counts['alice'] - counts['bob']) <= 8


def test_a_work_beyond_the_bound_runs_with_nobody_beside_it() -> None:
    """It took more than its time already."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.bound(600)
    for name, tokens in (('large', 1000), ('small', 20)):
        scheduler.add(work(name, tokens))
    assert [len(batch) for batch in drained(scheduler)] == [1, 1]
