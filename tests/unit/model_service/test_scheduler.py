"""Scheduling between tenants: no starvation, loss or duplicates, and shares by weight."""

import pickle
import random
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fixtures.scheduling import BUDGET, BusyAdapters, all_batches, ready_verb, run_pass, sizes
from twinkle_services.model.domain.scheduler import MAX_SIMULATED_BATCHES, QUICK_RUN, NextPass, ReadyVerb, Scheduler

KEYS = ('train', 'evaluate', None)
"""Batch keys; a verb with the key `None` runs alone."""


def ids(batch: Sequence[ReadyVerb]) -> list[str]:
    """Return the adapter ids of a batch."""
    return [item.adapter_id for item in batch]


ready_verbs = st.builds(
    ReadyVerb,
    adapter_id=st.integers(0, 40).map('a{}'.format),
    tenant_id=st.sampled_from(['alice', 'bob', 'carol', 'dave']),
    token_count=st.one_of(st.just(0), st.integers(1, 300), st.integers(1, 5000)),
    batch_key=st.sampled_from(KEYS),
)
bounds = st.one_of(st.none(), st.integers(0, 2000))
actions = st.lists(st.one_of(ready_verbs, st.just('next'), st.integers(0, 40).map('a{}'.format), bounds), max_size=200)
"""A ReadyVerb is added, 'next' takes a batch, an adapter's id cancels its verb, and a number or None sets the limit."""


@settings(max_examples=100)
@given(actions, st.dictionaries(st.sampled_from(['alice', 'bob']), st.floats(0.01, 100.0)))
def test_no_verb_is_lost_or_duplicated(actions: list[ReadyVerb | str | int | None], weights: dict[str, float]) -> None:
    """All tokens of each verb are scheduled once unless it is cancelled, and every batch respects the rules."""
    scheduler = Scheduler(batch_tokens=BUDGET, weights=weights)
    waiting: dict[str, ReadyVerb] = {}
    for action in [*actions, *(['next'] * 6 * len(actions))]:
        if action is None or isinstance(action, int):
            scheduler.bound(action)
        elif isinstance(action, ReadyVerb):
            if action.adapter_id not in waiting:
                scheduler.add(action)
                waiting[action.adapter_id] = action
        elif action == 'next':
            batch = scheduler.next_batch()
            assert bool(batch) == bool(waiting)
            assert [waiting.pop(item.adapter_id) for item in batch] == batch
            ran = [run_pass(scheduler, item) for item in batch]
            check_batch(ran)
            waiting |= rest_of(batch, ran)
        else:
            assert scheduler.remove(action) == waiting.pop(action, None)
        assert len(scheduler) == len(waiting)
        assert scheduler.token_count == sum(item.token_count for item in waiting.values())
    assert not waiting


def rest_of(batch: Sequence[ReadyVerb], ran: Sequence[ReadyVerb]) -> dict[str, ReadyVerb]:
    """Return the verbs of a batch that need more passes, by adapter."""
    pairs = zip(batch, ran, strict=True)
    rests = [replace(verb, token_count=verb.token_count - part.token_count, has_begun=True) for verb, part in pairs]
    return {verb.adapter_id: verb for verb in rests if verb.token_count}


def check_batch(batch: Sequence[ReadyVerb]) -> None:
    """Assert that the verbs of a batch may run together and fit into it."""
    if len(batch) < 2:
        return
    assert len({item.batch_key for item in batch}) == 1
    assert batch[0].batch_key is not None
    assert all(item.token_count for item in batch)
    assert sum(item.token_count for item in batch) <= BUDGET


def test_verbs_of_one_kind_fill_the_batch() -> None:
    """Sixteen verbs of 64 tokens fill a batch, and the seventeenth waits."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index in range(17):
        scheduler.add(ready_verb(f'a{index}', 64))
    assert [len(batch) for batch in all_batches(scheduler)] == [16, 1]


def test_kinds_are_never_mixed_and_exclusive_verbs_run_alone() -> None:
    """Training, evaluation and exclusive verbs run in separate batches."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index, key in enumerate(['train', 'evaluate', None, 'train', 'evaluate', None]):
        scheduler.add(ready_verb(f'a{index}', 10, key=key))
    assert [ids(batch) for batch in all_batches(scheduler)] == [['a0', 'a3'], ['a1', 'a4'], ['a2'], ['a5']]


def test_verbs_run_between_the_passes_of_a_large_verb() -> None:
    """Verbs of other tenants run between the passes of a large verb, and fill its last pass."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(ready_verb('large', 3 * BUDGET - 100))
    scheduler.add(ready_verb('between', 100, tenant='bob'))
    order = [ids([run_pass(scheduler, item) for item in scheduler.next_batch()]) for _ in range(3)]
    scheduler.add(ready_verb('fits', 100, tenant='bob'))
    assert [*order, *map(ids, all_batches(scheduler))] == [['large'], ['between'], ['large'], ['large', 'fits']]


def test_a_tenant_with_a_large_verb_pays_for_each_pass() -> None:
    """A tenant with large verbs gets, pass by pass, the same share as a tenant with small verbs."""
    busy = BusyAdapters(
        Scheduler(batch_tokens=BUDGET),
        {'large': sizes(1, 12000, 12000), 'small': sizes(2, 500, 500)},
        adapters={'large': 1, 'small': 8},
    )
    for _ in range(20):
        before = dict(busy.served)
        busy.run(12)
        large, small = [busy.served[tenant] - before.get(tenant, 0) for tenant in ('large', 'small')]
        assert large == pytest.approx(small, abs=2 * BUDGET)


def test_the_adapters_of_a_tenant_take_turns_between_passes() -> None:
    """A small verb does not wait for all passes of a large verb of its tenant's other adapter."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(ready_verb('large', 10 * BUDGET))
    run_pass(scheduler, scheduler.next_batch()[0])
    scheduler.add(ready_verb('small', 64))
    assert [ids(batch) for batch in all_batches(scheduler)][:3] == [['large'], ['small'], ['large']]


def test_quick_verbs_run_first_but_do_not_starve_batches() -> None:
    """Quick verbs run before a waiting batch, but at most `QUICK_RUN` of them in a row."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(ready_verb('batch', 64))
    for index in range(QUICK_RUN + 10):
        scheduler.add(ready_verb(f'q{index}', 0))
    order = [item.adapter_id for batch in all_batches(scheduler) for item in batch]
    assert order.index('batch') == QUICK_RUN


def test_quick_verbs_alternate_between_tenants() -> None:
    """Quick verbs alternate between tenants, even if one tenant has many."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index in range(50):
        scheduler.add(ready_verb(f'a{index}', 0))
    scheduler.add(ready_verb('b', 0, tenant='bob'))
    assert [ids(scheduler.next_batch()) for _ in range(3)] == [['a0'], ['b'], ['a1']]


def test_an_adapter_has_one_ready_verb() -> None:
    """Adding a second verb of an adapter raises ValueError."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(ready_verb('a', 1))
    with pytest.raises(ValueError, match='already'):
        scheduler.add(ready_verb('a', 0))


@pytest.mark.parametrize('seed', range(8))
def test_backlogged_tenants_share_tokens_by_weight(seed: int) -> None:
    """Tenants with a backlog get tokens in proportion to their weights, within ten percent, for any verb sizes."""
    rng = random.Random(seed)
    weights = {f't{index}': rng.choice([0.5, 1.0, 2.0, 3.0]) for index in range(4)}
    ranges = {tenant: rng.choice([(10, 64), (200, 900), (600, 600), (500, 4000)]) for tenant in weights}
    busy = BusyAdapters(
        Scheduler(batch_tokens=BUDGET, weights=weights),
        {tenant: sizes(seed, *ranges[tenant]) for tenant in weights},
        # There are enough adapters that no tenant's queue becomes empty within a batch.
        adapters=dict.fromkeys(weights, 110),
    )
    busy.run(1500)
    shares = [busy.served[tenant] / weight for tenant, weight in weights.items()]
    assert max(shares) <= 1.1 * min(shares)


def test_a_thousand_adapters_of_one_tenant_do_not_starve_another_tenant() -> None:
    """A tenant with one adapter runs in at least half of the batches although another has a thousand adapters."""
    busy = BusyAdapters(
        Scheduler(batch_tokens=BUDGET),
        {'many': sizes(1, 100, 100), 'one': sizes(2, 100, 100)},
        adapters={'many': 1000, 'one': 1},
    )
    busy.run(300)
    assert busy.turns.count('one-0') >= 150


def test_adapters_of_a_tenant_take_turns() -> None:
    """All adapters of a tenant are served equally often, because the scheduler alternates between them."""
    busy = BusyAdapters(Scheduler(batch_tokens=BUDGET), {'many': sizes(1, 1, 400)}, adapters={'many': 50})
    busy.run(400)
    turns = Counter(busy.turns)
    assert max(turns.values()) - min(turns.values()) <= 1


def test_an_idle_tenant_keeps_its_negative_credit() -> None:
    """A tenant that briefly has no verb keeps its negative credit."""
    busy = BusyAdapters(
        Scheduler(batch_tokens=BUDGET),
        {'many': sizes(1, 128, 128), 'one': sizes(2, 10_000, 10_000)},
        adapters={'many': 100, 'one': 1},
    )
    busy.run(1000)
    assert busy.served['one'] <= 1.1 * busy.served['many']


@pytest.mark.parametrize('seed', range(20))
def test_every_verb_is_served_within_a_bound(seed: int) -> None:
    """A new tenant's verb waits for at most one batch per other tenant, and for the quick verbs between the batches."""
    rng = random.Random(seed)
    tenants = {f't{index}': rng.randint(1, 30) for index in range(rng.randint(2, 6))}
    busy = BusyAdapters(
        Scheduler(batch_tokens=BUDGET),
        {tenant: sizes(seed + index, 0, rng.choice([50, 1500])) for index, tenant in enumerate(tenants)},
        adapters=tenants,
    )
    busy.run(rng.randint(50, 400))
    busy.scheduler.add(ready_verb('late', 700, tenant='late', key=rng.choice(KEYS)))
    batches: list[list[ReadyVerb]] = []
    while 'late' not in ids(batch := busy.scheduler.next_batch()):
        batches.append(batch)
        for item in batch:
            busy.add(item.adapter_id, item.tenant_id)
    heavy = sum(bool(batch[0].token_count) for batch in batches)
    # Each other tenant may be first in one earlier batch, and quick verbs may run before each batch.
    assert heavy <= len(tenants)
    assert len(batches) - heavy <= QUICK_RUN * (heavy + 1)


@settings(max_examples=80)
@given(st.lists(ready_verbs, max_size=60, unique_by=lambda item: item.adapter_id), st.integers(0, 59))
def test_predicted_positions_are_exact(items: list[ReadyVerb], chosen: int) -> None:
    """Exactly the predicted passes run first if no more verbs arrive; the prediction changes nothing."""
    scheduler, copied = Scheduler(batch_tokens=BUDGET), Scheduler(batch_tokens=BUDGET)
    for item in items:
        scheduler.add(item)
        copied.add(item)
    target = items[chosen % len(items)].adapter_id if items else 'a0'
    ahead = scheduler.ahead_of(target)
    batches = all_batches(scheduler)
    assert [ids(batch) for batch in batches] == [ids(batch) for batch in all_batches(copied)]
    if ahead is None:
        assert not items
        return
    position = next(index for index, batch in enumerate(batches) if target in ids(batch))
    before = batches[:position]
    heavy = [item for batch in before for item in batch if item.token_count]
    assert (ahead.batch_count + ahead.quick_count, ahead.heavy_count) == (len(before), len(set(ids(heavy))))
    assert ahead.token_count == sum(item.token_count for item in heavy)


def test_one_large_verb_of_a_tenant_runs_at_a_time() -> None:
    """A tenant's next large verb begins after its previous large verb, so that few adapters have an unfinished verb."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for name, tenant in (('a0', 'alice'), ('a1', 'alice'), ('b0', 'bob'), ('b1', 'bob')):
        scheduler.add(ready_verb(name, 3 * BUDGET, tenant=tenant))
    scheduler.add(ready_verb('small', 64))
    order = [name for batch in all_batches(scheduler) for name in ids(batch)]
    assert [name for name in order if name.startswith('a')] == [*['a0'] * 3, *['a1'] * 3]
    assert [name for name in order if name.startswith('b')] == [*['b0'] * 3, *['b1'] * 3]
    assert order.index('small') <= 3


def test_a_tenant_pays_only_for_passes_that_ran() -> None:
    """A large verb that ends early, or whose pass runs few tokens, delays its tenant only for the tokens that ran."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.add(ready_verb('bob', 64, tenant='bob', key='evaluate'))
    scheduler.add(ready_verb('ended', 100 * BUDGET))
    waits: list[int] = []
    for token_count in (BUDGET, 10):
        while ids(batch := scheduler.next_batch()) == ['bob']:
            scheduler.add(replace(batch[0], token_count=BUDGET))
        scheduler.charge(batch[0], token_count)
        scheduler.add(ready_verb('next', 60, key='train'))
        waits.append(0)
        while ids(batch := scheduler.next_batch()) == ['bob']:
            waits[-1] += 1
            scheduler.add(batch[0])
        scheduler.add(ready_verb('ended', 100 * BUDGET))
    assert max(waits) <= 2


def test_positions_behind_many_passes_are_estimated() -> None:
    """The simulation ends after a limit; all other verbs then count as earlier verbs."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for index in range(30):
        scheduler.add(ready_verb(f'a{index}', 1000 * BUDGET))
    scheduler.add(ready_verb('last', 1000 * BUDGET))
    scheduler.add(ready_verb('behind', 64, key='evaluate'))
    simulated = scheduler.ahead_of('last')
    assert simulated is not None
    assert (simulated.batch_count, simulated.heavy_count) == (MAX_SIMULATED_BATCHES + 1, 31)
    for index in range(1000):
        scheduler.add(ready_verb(f'b{index}', BUDGET))
    ahead = scheduler.ahead_of('b999')
    assert ahead is not None
    assert (ahead.heavy_count, ahead.batch_count) == (1031, MAX_SIMULATED_BATCHES + 1)
    assert ahead.token_count == scheduler.token_count - BUDGET


def test_idle_tenants_are_removed() -> None:
    """Idle tenants are removed while another tenant always has work."""
    busy = BusyAdapters(Scheduler(batch_tokens=BUDGET), {'many': sizes(1, 400, 600)}, adapters={'many': 8})
    before = len(pickle.dumps(busy.scheduler))
    for index in range(1000):
        busy.scheduler.add(ready_verb('guest', 500, tenant=f't{index}'))
        while busy.scheduler.ahead_of('guest') is not None:
            busy.run(1)
    busy.run(10)
    assert len(pickle.dumps(busy.scheduler)) < 2 * before


def test_unequal_demand_is_shared_equally_if_batches_are_limited() -> None:
    """Full batches are shared by demand; limited batches are shared equally by tenants of equal weight."""
    adapters = {'many': 26, 'more': 19, 'some': 13, 'few': 6}
    served = {bound: served_of(adapters, bound) for bound in (None, 128)}
    assert served[None]['many'] == pytest.approx(26 / 64, abs=0.01)
    assert all(part == pytest.approx(0.25, abs=0.01) for part in served[128].values())


def served_of(adapters: dict[str, int], bound: int | None) -> dict[str, float]:
    """Return each tenant's share of the verbs in 500 batches; a served adapter is ready again one batch later."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.bound(bound)
    absent = [
        ready_verb(f'{tenant}-{index}', 16, tenant=tenant)
        for tenant, maximum in adapters.items()
        for index in range(maximum)
    ]
    counts: Counter[str] = Counter()
    for _ in range(500):
        for item in absent:
            scheduler.add(item)
        absent = scheduler.next_batch()
        counts.update(item.tenant_id for item in absent)
    return {tenant: count / counts.total() for tenant, count in counts.items()}


def test_the_batch_limit_has_a_minimum_and_a_maximum() -> None:
    """The batch limit is from MIN_BATCH_TOKENS to the engine's maximum; a tenant that is alone has no limit."""
    for bound, expected in ((0, 8), (128, 8), (500, 31), (10**9, 64), (None, 64)):
        for tenants, length in ((('alice', 'bob'), expected), (('alice',), 64)):
            scheduler = Scheduler(batch_tokens=BUDGET)
            scheduler.bound(bound)
            for number in range(100):
                scheduler.add(ready_verb(f'a{number}', 16, tenant=tenants[number % len(tenants)]))
            assert len(scheduler.next_batch()) == length


def test_credits_of_large_passes_do_not_delay_new_tenants() -> None:
    """Credits from large passes do not delay a new tenant after the passes become small."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    for number in range(60):
        scheduler.add(ready_verb(f'early-{number}', 16))
    scheduler.next_batch()
    scheduler.bound(128)
    for number in range(60):
        scheduler.add(ready_verb(f'early-{number}', 16))
        scheduler.add(ready_verb(f'late-{number}', 16, tenant='bob'))
    counts: Counter[str] = Counter()
    for _ in range(4):
        counts.update(item.tenant_id for item in scheduler.next_batch())
    assert abs(counts['alice'] - counts['bob']) <= 8


def test_a_verb_beyond_the_limit_runs_alone() -> None:
    """A verb larger than the limit runs without other verbs of its tenant while another tenant waits."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.bound(600)
    for name, tenant, tokens in (('large', 'alice', 1000), ('small', 'alice', 20), ('other', 'bob', 40)):
        scheduler.add(ready_verb(name, tokens, tenant=tenant))
    assert [[item.adapter_id for item in batch] for batch in all_batches(scheduler)] == [['large'], ['other', 'small']]


def test_each_tenant_has_one_verb_in_a_limited_batch() -> None:
    """A limited batch has one verb of each tenant, and waits for tenants whose verbs would fit."""
    scheduler = Scheduler(batch_tokens=BUDGET)
    scheduler.bound(128)
    for number in range(8):
        assert scheduler.next_pass() is None or not scheduler.next_pass().is_full
        scheduler.add(ready_verb(f'a{number}', 64, tenant=f't{number}'))
    for number in range(8, 40):
        scheduler.add(ready_verb(f'a{number}', 64, tenant='t0'))
    assert scheduler.next_pass() == NextPass(token_count=BUDGET, is_full=True)
    assert Counter(item.tenant_id for item in scheduler.next_batch()) == {f't{number}': 1 for number in range(8)}


def test_weights_apply_in_limited_batches() -> None:
    """A tenant of weight 3 runs three times as many verbs as tenants of weight 1 in limited batches."""
    scheduler = Scheduler(batch_tokens=BUDGET, weights={'t0': 3.0})
    scheduler.bound(128)
    absent = [ready_verb(f'a{tenant}-{number}', 64, tenant=f't{tenant}') for tenant in range(4) for number in range(9)]
    counts: Counter[str] = Counter()
    for _ in range(600):
        for item in absent:
            scheduler.add(item)
        absent = scheduler.next_batch()
        counts.update(item.tenant_id for item in absent)
    assert counts['t0'] / counts['t1'] == pytest.approx(3, rel=0.02)
    assert counts['t1'] == pytest.approx(counts['t3'], rel=0.02)
