"""Rows in memory are limited per dataset, per tenant and in total, and are released afterwards."""

import pytest

from twinkle_services.data.domain import DecodedBytes, DecodedLimits
from twinkle_services.kit.errors import BytesFull, Cancelled, QuotaExceeded


def decoded(**limits: int) -> DecodedBytes:
    """Return counters with these limits; all other limits are high."""
    high = {'rows': 1000, 'dataset_bytes': 1000, 'tenant_bytes': 1000, 'total_bytes': 1000}
    return DecodedBytes(DecodedLimits(**(high | limits)))


@pytest.mark.parametrize(('limits', 'quota'), [({'rows': 2}, 'dataset_rows'), ({'dataset_bytes': 25}, 'dataset_bytes')])
def test_large_dataset_is_refused_by_quota(limits: dict[str, int], quota: str) -> None:
    """The row that exceeds a limit of the dataset is refused with the limit's name, and does not count."""
    counters = decoded(**limits)
    with counters.meter('alice') as meter:
        meter.charge(10, 1)
        meter.charge(10, 1)
        with pytest.raises(QuotaExceeded) as refusal:
            meter.charge(10, 1)
        assert (refusal.value.quota, counters.held_bytes) == (quota, 20)
    assert counters.held_bytes == 0


@pytest.mark.parametrize(('limits', 'other'), [({'tenant_bytes': 15}, 'alice'), ({'total_bytes': 15}, 'bob')])
def test_rows_of_all_open_requests_count(limits: dict[str, int], other: str) -> None:
    """The open requests of a tenant share the tenant's limit, and those of all tenants share the total limit."""
    counters = decoded(**limits)
    with counters.meter(other) as first, counters.meter('alice') as second:
        first.charge(10, 1)
        with pytest.raises(BytesFull):
            second.charge(10, 1)
        first.close()
        second.charge(10, 1)


def test_replaced_rows_are_released_after_a_step() -> None:
    """A step may create as many rows as it replaces; old and new rows are both in memory until the step ends."""
    counters = decoded(dataset_bytes=10)
    with counters.meter('alice') as meter:
        meter.charge(10, 1)
        with meter.replacing():
            meter.charge(8, 1)
            assert counters.held_bytes == 18
        assert (counters.held_bytes, meter.size_bytes) == (8, 8)


def test_failed_step_releases_everything() -> None:
    """The end of a request releases the rows that a failed step created and those that it would have replaced."""
    counters = decoded()
    with counters.meter('alice') as meter:
        meter.charge(990, 1)
        with pytest.raises(QuotaExceeded), meter.replacing():
            meter.charge(1001, 1)
        assert counters.held_bytes == 990
    assert counters.held_bytes == 0


def test_charge_after_the_end_of_a_request_is_refused() -> None:
    """A charge after the end of its request raises Cancelled, and a release after the end has no effect."""
    counters = decoded()
    with counters.meter('alice') as meter:
        meter.charge(10, 1)
    with pytest.raises(Cancelled):
        meter.charge(1, 1)
    meter.charge(-10)
    assert counters.held_bytes == 0
