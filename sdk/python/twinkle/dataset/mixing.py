"""The order in which several datasets become one."""

from collections.abc import Sequence
from itertools import zip_longest

Place = tuple[int, int]
"""`(part, row)`: a row of one of several datasets."""


def mixed_order(sizes: Sequence[int], *, is_interleaved: bool) -> list[Place]:
    """Return the places of all rows: alternating, then what is left of the longer ones; or one after the other."""
    parts = [[(part, row) for row in range(size)] for part, size in enumerate(sizes)]
    if not is_interleaved:
        return [place for places in parts for place in places]
    return [place for places in zip_longest(*parts) for place in places if place is not None]
