"""Put lengths into bins of a fixed size, best fit first (Johnson 1973)."""

from bisect import bisect_left, insort
from collections.abc import Sequence


def pack_best_fit(lengths: Sequence[int], *, capacity: int) -> list[list[int]]:
    """Return bins of indices whose lengths sum to at most `capacity` each.

    The longest goes first, each into the fullest bin that still has room. Indices within a
    bin ascend, and bins are ordered by their first index; the result depends on the lengths alone.

    Raises:
        ValueError: a length is larger than the capacity.
    """
    too_long = [index for index, length in enumerate(lengths) if length > capacity]
    if too_long:
        raise ValueError(f'item {too_long[0]} has length {lengths[too_long[0]]}, more than a bin of {capacity} holds')
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (room left, bin), ascending
    for index in sorted(range(len(lengths)), key=lambda index: -lengths[index]):
        place = bisect_left(free, (lengths[index], -1))
        if place < len(free):
            room, chosen = free.pop(place)
        else:
            room, chosen = capacity, len(bins)
            bins.append([])
        bins[chosen].append(index)
        insort(free, (room - lengths[index], chosen))
    return sorted(sorted(items) for items in bins)
