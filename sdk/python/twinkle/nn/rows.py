"""Shapes at which each row of a matrix product has the same bits whatever its neighbours.

What was found with torch 2.13 and its MKL on CPUs, by sweeping rows, offsets, alignments and 1 to 8
threads (docs/LOG.md): rows differ where a thread gets fewer than 4, so from 12 rows on, and at every
multiple of 4, each row of a product is the same alone and within any larger one; 16 leaves a margin.
Elementwise kernels end in a scalar tail whose exponential is rounded otherwise, so a tensor's element
count must be a multiple of the vector width, and models must not call those kernels where threads cut
tensors at other places (`twinkle.nn.gated_mlp`).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MIN_ROWS = 16
"""Fewest rows of a matrix product."""
_BLOCK_ROWS = {'cpu': 128}
_BLOCK_ROWS_OF_ACCELERATORS = 1024
ALIGNMENT_BYTES = 64
"""Of the first element; what torch allocates, and one cache line."""
_VECTOR = 32
"""Elements that the widest vector loop of an elementwise kernel takes at once (two registers of AVX-512)."""


def padded_row_count(row_count: int, widths: Iterable[int]) -> int:
    """Return how many rows to run for `row_count` of them, so that no tensor of them has a scalar tail.

    Args:
        row_count: rows with tokens.
        widths: numbers of columns of what the model computes by rows.
    """
    multiple = _VECTOR // math.gcd(_VECTOR, *widths)
    return -(-max(row_count, MIN_ROWS) // multiple) * multiple


def block_rows(device: torch.device) -> int:
    """Return the rows of one block of the output head: as many as keep a block's logits to some tens of megabytes."""
    return _BLOCK_ROWS.get(device.type, _BLOCK_ROWS_OF_ACCELERATORS)


def pad_rows(x: Tensor, row_count: int) -> Tensor:
    """Return `x` with zero rows added up to `row_count`, or `x` itself where it has as many."""
    missing = row_count - x.shape[0]
    return x if missing <= 0 else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def is_stable(x: Tensor) -> bool:
    """Tell whether a product of these rows has the bits that the same rows have in any other place."""
    return x.shape[0] >= MIN_ROWS and x.data_ptr() % ALIGNMENT_BYTES == 0


def stable_rows(x: Tensor) -> Tensor:
    """Return `x` itself where `is_stable`, else a copy that is, padded with zero rows."""
    if x.shape[0] < MIN_ROWS:
        return pad_rows(x, MIN_ROWS)
    return x if is_stable(x) else x.clone()
