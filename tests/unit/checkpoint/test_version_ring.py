"""The ring of an adapter's versions, compared with a simple model of its rules."""

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle_services.checkpoint.domain import AdapterKey, AdapterVersion, VersionConflict, VersionRing
from twinkle_services.kit.errors import InUse, QuotaExceeded, VersionNotFound

ADAPTER = AdapterKey('alice', 'ad-1')


def make_version(number: int, *, digest: str = 'd', is_pinned: bool = False) -> AdapterVersion:
    return AdapterVersion(
        adapter=ADAPTER,
        version=number,
        digest=digest,
        size_bytes=1,
        is_pinned=is_pinned,
        create_time=datetime(2026, 1, 1, tzinfo=UTC),
    )


def make_ring(*numbers: int, capacity: int = 3, pin_limit: int = 2) -> VersionRing:
    ring = VersionRing(ADAPTER, capacity=capacity, pin_limit=pin_limit)
    for number in numbers:
        ring.add(make_version(number))
    return ring


@given(
    steps=st.lists(st.tuples(st.sampled_from(['add', 'pin', 'unpin', 'delete']), st.integers(1, 12)), max_size=60),
    capacity=st.integers(1, 4),
    pin_limit=st.integers(0, 3),
)
def test_ring_is_bounded_and_keeps_newest_and_pinned(
    steps: list[tuple[str, int]], capacity: int, pin_limit: int
) -> None:
    """The ring respects its limits and contains the newest and all pinned versions after any sequence of operations."""
    ring = make_ring(capacity=capacity, pin_limit=pin_limit)
    newest, pinned = 0, set[int]()
    for verb, number in steps:
        if verb == 'add':
            newest += number
            assert ring.match(newest, 'd', is_pinned=False) is None
            evicted = {version.version for version in ring.add(make_version(newest))}
            assert not evicted & ({newest} | pinned)
        elif ring.has(number):
            _change(ring, verb, number, newest=newest, pinned=pinned, pin_limit=pin_limit)
        stored = {version.version for version in ring.all_newest_first()}
        assert pinned <= stored
        assert len(stored - pinned) <= capacity
        assert len(pinned) <= pin_limit
        assert not newest or (ring.newest is not None and ring.newest.version == newest)


def _change(ring: VersionRing, verb: str, number: int, *, newest: int, pinned: set[int], pin_limit: int) -> None:
    if verb == 'delete':
        if number == newest or number in pinned:
            with pytest.raises(InUse):
                ring.check_removable(number)
        else:
            ring.remove(ring.check_removable(number).version)
        return
    if verb == 'pin' and number not in pinned and len(pinned) == pin_limit:
        with pytest.raises(QuotaExceeded):
            ring.pinned(number, is_pinned=True)
        return
    changed = ring.pinned(number, is_pinned=verb == 'pin')
    ring.add(changed)
    pinned.add(number) if changed.is_pinned else pinned.discard(number)


def test_get_returns_a_version_by_number_or_the_newest() -> None:
    """A version is found by its number; 0 means the newest version. The error for a missing version has its number."""
    ring = make_ring(3, 5)
    assert (ring.get(3).version, ring.get(0).version) == (3, 5)
    for ring_, number in ((ring, 4), (make_ring(), 0)):
        with pytest.raises(VersionNotFound) as caught:
            ring_.get(number)
        assert caught.value.version == number


@pytest.mark.parametrize(('number', 'digest'), [(5, 'other'), (4, 'd'), (1, 'd')])
def test_version_numbers_must_increase(number: int, digest: str) -> None:
    """A number that another state uses, and an unused number below the newest number, are refused."""
    with pytest.raises(VersionConflict):
        make_ring(3, 5).match(number, digest, is_pinned=False)


@pytest.mark.parametrize('number', [3, 5])
def test_equal_version_is_returned_and_not_added_again(number: int) -> None:
    """A version with a known number and digest is returned instead of being added again."""
    found = make_ring(3, 5).match(number, 'd', is_pinned=False)
    assert found is not None
    assert found.version == number
