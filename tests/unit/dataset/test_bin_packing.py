"""Best-fit packing keeps every item and wastes little space."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from twinkle.dataset import pack_best_fit


@given(st.lists(st.integers(0, 50), max_size=200))
def test_bins_partition_the_items(lengths: list[int]) -> None:
    """Every item is in exactly one bin, and no bin exceeds the capacity."""
    bins = pack_best_fit(lengths, capacity=50)
    assert sorted(index for items in bins for index in items) == list(range(len(lengths)))
    assert all(sum(lengths[index] for index in items) <= 50 for items in bins)


@given(st.lists(st.integers(1, 50), min_size=1, max_size=200))
def test_bins_are_more_than_half_full_on_average(lengths: list[int]) -> None:
    """The two emptiest bins cannot be joined, so less than twice the necessary number of bins is used."""
    bins = pack_best_fit(lengths, capacity=50)
    loads = sorted(sum(lengths[index] for index in items) for items in bins)
    assert len(loads) < 2 or loads[0] + loads[1] > 50


def test_exact_fits_are_found() -> None:
    """An item goes into the bin with the least free space that is large enough."""
    assert pack_best_fit([6, 5, 4, 5], capacity=10) == [[0, 2], [1, 3]]


def test_item_larger_than_a_bin_is_refused() -> None:
    """The error for an item above the capacity names the item."""
    with pytest.raises(ValueError, match='item 1'):
        pack_best_fit([1, 11], capacity=10)
