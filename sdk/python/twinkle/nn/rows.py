"""Row counts at which a matrix product gives each row the same bits whatever its neighbours."""

import torch
from torch import Tensor

MIN_ROWS = 16
"""Fewest rows of a matrix product. Measured with torch 2.13 on one CPU thread: from 16 rows on, each
row of a product is bitwise the same alone and within any larger batch; below, kernels differ."""
BLOCK_ROWS = 128
"""Rows of one block of the output head."""


def pad_rows(x: Tensor, row_count: int) -> Tensor:
    """Return `x` with zero rows added up to `row_count`, or `x` itself where it has as many."""
    missing = row_count - x.shape[0]
    return x if missing <= 0 else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])
