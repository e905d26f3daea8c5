"""The rules of the fleet: membership, replica states, and the tree that relays weights."""

from datetime import timedelta

import pytest

from twinkle_services.gateway.errors import ReplicaNotFound
from twinkle_services.gateway.fleet.rules import (
    Fleet,
    ReplicaLoad,
    ReplicaReport,
    ReplicaState,
    ResidentAdapter,
    serving_run,
    weight_sources,
)
from twinkle_services.kit.clock import FakeClock

LEASE = timedelta(seconds=10)


def report(replica_id: str, *, address: str = '', **fields) -> ReplicaReport:
    """Return a valid report; each replica has a different default address."""
    return ReplicaReport(replica_id=replica_id, service='sampler', address=address or f'host:{replica_id}', **fields)


def new_fleet() -> tuple[Fleet, FakeClock]:
    """Return an empty fleet and its clock."""
    clock = FakeClock()
    return Fleet(clock=clock, lease=LEASE, forget_after=timedelta(minutes=1)), clock


def states(fleet: Fleet) -> dict[str, ReplicaState]:
    """Return the state of each replica by id."""
    return {replica.replica_id: replica.state for replica in fleet.replicas()}


def test_silent_replica_is_lost_then_removed() -> None:
    """A replica that is silent beyond its lease is lost; its next report restores it, and a long silence removes it."""
    fleet, clock = new_fleet()
    fleet.register(report('a'))
    clock.advance(LEASE)
    fleet.expire()
    assert states(fleet) == {'a': ReplicaState.READY}
    clock.advance(timedelta(seconds=1))
    fleet.expire()
    assert states(fleet) == {'a': ReplicaState.LOST}
    assert fleet.serving('sampler') == []
    fleet.renew(report('a'))
    assert states(fleet) == {'a': ReplicaState.READY}
    clock.advance(timedelta(minutes=2))
    fleet.expire()
    assert states(fleet) == {}
    with pytest.raises(ReplicaNotFound):
        fleet.renew(report('a'))


def test_end_of_lease_loses_a_ready_replica_and_removes_a_draining_one() -> None:
    """When its lease ends, a draining replica leaves the fleet and a ready replica is lost."""
    fleet, _ = new_fleet()
    for name in 'ab':
        fleet.register(report(name))
    numbers = {name: fleet.begin_lease(name) for name in 'ab'}
    fleet.drain('b')
    for name in 'ab':
        fleet.end_lease(name, numbers[name])
    assert states(fleet) == {'a': ReplicaState.LOST}


def test_end_of_a_superseded_lease_is_ignored() -> None:
    """A replica that has reconnected stays ready when its old connection ends."""
    fleet, _ = new_fleet()
    fleet.register(report('a'))
    old = fleet.begin_lease('a')
    fleet.begin_lease('a')
    fleet.end_lease('a', old)
    assert states(fleet) == {'a': ReplicaState.READY}


def test_drained_replica_stays_draining_until_it_registers_again() -> None:
    """Reports do not end a drain; a new registration at the same address replaces the drained replica."""
    fleet, _ = new_fleet()
    fleet.register(report('a'))
    fleet.drain('a')
    assert fleet.renew(report('a')).state is ReplicaState.DRAINING
    fleet.register(report('b', address='host:a'))
    assert states(fleet) == {'b': ReplicaState.READY}


def test_lost_replica_cannot_be_drained() -> None:
    """Draining a lost replica raises ReplicaNotFound."""
    fleet, _ = new_fleet()
    fleet.register(report('a'))
    fleet.mark_lost('a')
    with pytest.raises(ReplicaNotFound):
        fleet.drain('a')


def test_static_replica_is_never_removed() -> None:
    """A silent static replica stays listed. It serves no requests while a leased replica has its address."""
    fleet, clock = new_fleet()
    fleet.register(report('static', address='h:1'), is_static=True)
    clock.advance(timedelta(hours=1))
    fleet.expire()
    fleet.mark_lost('static')
    assert [replica.replica_id for replica in fleet.serving('sampler')] == ['static']
    fleet.register(report('leased', address='h:1'))
    assert [replica.replica_id for replica in fleet.serving('sampler')] == ['leased']
    assert set(states(fleet)) == {'static', 'leased'}


def test_each_failure_lengthens_the_back_off_of_a_replica() -> None:
    """Each failure lengthens the back-off of a replica, and a success ends it."""
    fleet, clock = new_fleet()
    fleet.register(report('a'))
    fleet.note_failure('a')
    assert not fleet.is_reachable('a')
    clock.advance(timedelta(seconds=0.5))
    assert fleet.is_reachable('a')
    fleet.note_failure('a')
    clock.advance(timedelta(seconds=0.5))
    assert not fleet.is_reachable('a')
    fleet.note_success('a')
    assert fleet.is_reachable('a')


def test_learned_versions_last_until_the_next_report() -> None:
    """A replica's report replaces the versions that the gateway learned from the replica's responses."""
    fleet, _ = new_fleet()
    fleet.register(report('a', resident_adapters=(ResidentAdapter(adapter_id='x', version=1),)))
    fleet.note_resident('a', 'x', 2)
    assert sorted(fleet.versions_at('a', 'x')) == [1, 2]
    fleet.renew(report('a', resident_adapters=(ResidentAdapter(adapter_id='x', version=2),)))
    assert list(fleet.versions_at('a', 'x')) == [2]


def test_changes_after_a_revision_are_complete() -> None:
    """A watcher receives each replica's latest state and the ids of replicas that left."""
    fleet, _ = new_fleet()
    fleet.register(report('a'))
    seen = fleet.revision
    fleet.register(report('b'))
    fleet.renew(report('b', engine='x'))
    fleet.drain('a')
    fleet.end_lease('a', 0)
    changed, left = fleet.changes_after(seen)
    assert [(replica.replica_id, replica.report.engine) for replica in changed] == [('b', 'x')]
    assert left == ['a']
    assert fleet.changes_after(fleet.revision) == ([], [])


def test_unchanged_report_is_not_a_change() -> None:
    """A repeated report renews the lease without a new revision, unless it ends a back-off."""
    fleet, clock = new_fleet()
    fleet.register(report('a'), is_static=True)
    seen = fleet.revision
    clock.advance(timedelta(seconds=1))
    assert fleet.renew(report('a')).heartbeat_time == clock.now()
    assert fleet.revision == seen
    fleet.note_failure('a')
    fleet.renew(report('a'))
    assert fleet.revision == seen + 1
    fleet.renew(report('a', engine='x'))
    assert fleet.revision == seen + 2


def test_lost_replica_has_no_load() -> None:
    """The load of a lost replica is cleared, and its next report sets the load again."""
    fleet, _ = new_fleet()
    busy = report('a', load=ReplicaLoad(running_sequence_count=3))
    fleet.register(busy)
    fleet.mark_lost('a')
    assert fleet.replicas()[0].report.load is None
    fleet.renew(busy)
    assert fleet.replicas()[0].report.load == busy.load


@pytest.mark.parametrize(('fan_out', 'count'), [(1, 5), (2, 9), (3, 20)])
def test_relay_tree_reaches_every_sampler_within_the_fan_out(fan_out: int, count: int) -> None:
    """No source has more readers than the fan-out allows, and every chain ends at the checkpoint service."""
    fleet, clock = new_fleet()
    for index in range(count):
        fleet.register(report(f'{index:02}'))
        clock.advance(timedelta(seconds=1))
    sources = weight_sources(fleet.replicas(), fan_out=fan_out)
    readers = list(sources.values())
    assert max(readers.count(source) for source in set(readers)) <= fan_out
    by_address = {replica.address: replica.replica_id for replica in fleet.replicas()}
    for replica_id in sources:
        current, step_count = replica_id, 0
        while sources[current]:
            current, step_count = by_address[sources[current]], step_count + 1
        assert step_count <= count


def test_relay_tree_is_off_by_default_and_keeps_base_models_apart() -> None:
    """All samplers use the checkpoint service unless a fan-out is set, and no tree mixes base models."""
    fleet, _ = new_fleet()
    for name in 'abcd':
        fleet.register(report(name, base_models=('x' if name in 'ab' else 'y',)))
    assert set(weight_sources(fleet.replicas(), fan_out=0).values()) == {''}
    sources = weight_sources(fleet.replicas(), fan_out=1)
    assert sources == {'a': '', 'b': 'host:a', 'c': '', 'd': 'host:c'}


def test_dedicated_samplers_serve_their_run_only() -> None:
    """Requests for a run go to its dedicated samplers, and all other requests go to other samplers."""
    fleet, _ = new_fleet()
    fleet.register(report('shared'))
    fleet.register(report('dedicated', followed_run='full'))
    members = fleet.serving('sampler')
    assert [item.replica_id for item in serving_run('full', members)] == ['dedicated']
    assert [item.replica_id for item in serving_run('ad-1', members)] == ['shared']
    assert [item.replica_id for item in serving_run('', members)] == ['shared']
