"""The order of rows when several datasets are mixed into one."""

from collections.abc import Sequence
from itertools import zip_longest

RowReference = tuple[int, int]
"""`(part, row)`: index of a dataset and index of a row in it."""


def mixed_order(sizes: Sequence[int], *, is_interleaved: bool) -> list[RowReference]:
    """Return references to all rows, either in turn from each dataset or one dataset after the other.

    Args:
        sizes: number of rows of each dataset.
        is_interleaved: whether to take rows in turn; an exhausted dataset is skipped.
    """
    parts = [[(part, row) for row in range(size)] for part, size in enumerate(sizes)]
    if not is_interleaved:
        return [reference for references in parts for reference in references]
    return [reference for references in zip_longest(*parts) for reference in references if reference is not None]
