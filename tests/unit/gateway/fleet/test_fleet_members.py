"""Members of the fleet: the replica found for a request, and the watch that reports changes."""

import asyncio
from datetime import timedelta

from hypothesis import given
from hypothesis import strategies as st

from fixtures.recorded_metrics import metric
from twinkle_services.gateway.config import FleetConfig
from twinkle_services.gateway.fleet.grpc import is_this_host
from twinkle_services.gateway.fleet.members import Membership
from twinkle_services.gateway.fleet.replicas import Replicas
from twinkle_services.gateway.fleet.rules import Fleet, ReplicaLoad, ReplicaReport
from twinkle_services.gateway.fleet.sampler_choice import RouteKey
from twinkle_services.kit.caller import Caller
from twinkle_services.kit.clock import FakeClock
from twinkle_services.kit.telemetry import measures

KEY = RouteKey(base_model='m', blocks=(1,))
OPERATOR = Caller(tenant_id='t', scopes=frozenset({'operator'}))


def new_membership() -> Membership:
    """Return the membership of a fleet without replicas."""
    return Membership(Fleet(clock=FakeClock(), lease=timedelta(seconds=10), forget_after=timedelta(minutes=1)))


def report(replica_id: str, *, base_model: str = 'm', running: int = 0) -> ReplicaReport:
    """Return a valid report."""
    load = ReplicaLoad(running_sequence_count=running, max_sequence_count=4)
    return ReplicaReport(
        replica_id=replica_id, service='sampler', address=f'h:{replica_id}', base_models=(base_model,), load=load
    )


def test_samplers_are_counted_by_state() -> None:
    """A metric counts the samplers by their state."""
    membership = new_membership()
    for name in ('a', 'b', 'c', 'd'):
        membership.fleet.register(report(name))
    membership.fleet.drain('b')
    membership.fleet.mark_lost('c')
    with measures.fleet_members.observing(membership.count_by_state):
        counts = [metric('twinkle_fleet_members', state=state) for state in ('ready', 'draining', 'lost')]
    assert counts == [2, 1, 1]


@given(st.lists(st.sampled_from(['ready', 'full', 'draining', 'lost', 'failed', 'other']), min_size=1, max_size=6))
def test_find_prefers_free_then_full_then_failed_replicas(kinds: list[str]) -> None:
    """`find_for` returns a free replica, else a full one, else a failed one, and never a draining or lost one."""
    membership = new_membership()
    for index, kind in enumerate(kinds):
        name = f'{kind}-{index}'
        membership.fleet.register(
            report(name, base_model='n' if kind == 'other' else 'm', running=4 if kind == 'full' else 0)
        )
        if kind == 'draining':
            membership.fleet.drain(name)
        if kind == 'lost':
            membership.fleet.mark_lost(name)
        if kind == 'failed':
            membership.fleet.note_failure(name)
    found = membership.find_for(KEY, excluded=frozenset())
    kind = found.replica_id.partition('-')[0] if found else None
    best = next((kind for kind in ('ready', 'full', 'failed') if kind in kinds), None)
    assert kind == best


def test_excluded_replica_is_not_found() -> None:
    """A replica that was already tried is not returned again."""
    membership = new_membership()
    membership.fleet.register(report('a'))
    assert membership.find_for(KEY, excluded={'a'}) is None


async def test_watch_sends_a_snapshot_then_changes_and_resumes() -> None:
    """A watch yields all replicas, a sync marker, and then changes; its token resumes after the last change."""
    membership = new_membership()
    membership.fleet.register(report('a'))
    replicas = Replicas(
        membership,
        FleetConfig(),
        checkpoint_address='',
        is_this_host=is_this_host,
    )
    events = replicas.watch(OPERATOR, '')
    first, synced = await anext(events), await anext(events)
    assert first.replica is not None
    assert first.replica.replica_id == 'a'
    assert (synced.replica, synced.left_replica_id) == (None, '')
    pending = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    membership.fleet.register(report('b'))
    event = await pending
    assert event.replica is not None
    assert event.replica.replica_id == 'b'
    await events.aclose()
    membership.fleet.drain('a')
    membership.fleet.end_lease('a', 0)
    resumed = replicas.watch(OPERATOR, event.resume_token)
    assert (await anext(resumed)).left_replica_id == 'a'
    pending = asyncio.ensure_future(anext(resumed, None))
    await asyncio.sleep(0)
    membership.close()
    assert await pending is None


async def test_watches_and_listeners_receive_departures() -> None:
    """A replica that leaves the fleet is a change: listeners are called, and a waiting watch yields its id."""
    membership = new_membership()
    membership.fleet.register(report('a'))
    membership.fleet.drain('a')
    replicas = Replicas(membership, FleetConfig(), checkpoint_address='', is_this_host=is_this_host)
    events, sizes = replicas.watch(OPERATOR, ''), list[int]()
    await anext(events)
    await anext(events)
    pending = asyncio.ensure_future(anext(events))
    await asyncio.sleep(0)
    membership.on_change(lambda: sizes.append(len(membership.fleet.replicas())))
    membership.fleet.end_lease('a', 0)
    assert sizes == [0]
    assert (await pending).left_replica_id == 'a'
    await events.aclose()


def test_load_of_departed_replicas_is_bounded() -> None:
    """Loads are tracked for current replicas only, even after many replicas have joined and left."""
    clock = FakeClock()
    membership = Membership(Fleet(clock=clock, lease=timedelta(seconds=10), forget_after=timedelta(minutes=1)))
    for number in range(50):
        with membership.track_sequences(membership.fleet.register(report(f'r-{number}')), 2):
            clock.advance(timedelta(minutes=2))
        membership.expire()
        assert membership.known_load_count <= 1
