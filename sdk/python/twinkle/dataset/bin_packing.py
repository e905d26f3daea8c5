"""Best-fit-decreasing bin packing (Johnson 1973)."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return bins of indices; the lengths in each bin sum to at most `capacity`.

    Items are placed in order of decreasing length, each into the fullest bin that has enough space. The result is
    deterministic: indices within a bin ascend, and bins are ordered by their first index.

    Args:
        lengths: length of each item.
        capacity: maximum total length of a bin, in the same unit.

    Raises:
        ValueError: a length is larger than the capacity.
    """
    too_long = [index for index, length in enumerate(lengths) if length > capacity]
    if too_long:
        raise ValueError(f'item {too_long[0]} has length {lengths[too_long[0]]}, more than the capacity {capacity}')
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (free space, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        position = bisect_left(free, (lengths[index], -1))
        if position < len(free):
            space, chosen = free.pop(position)
        else:
            space, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(free, (space - lengths[index], chosen))
    return sorted(sorted(items) for items in bins)
