"""Shapes at which each row of a matrix product is bitwise independent of the other rows.

Measured with torch 2.13 and its MKL on CPUs over row counts, offsets, alignments and 1 to 8 threads
(docs/LOG.md): results differ where a thread processes fewer than 4 rows. From 12 rows on, in multiples of 4, each
row of a product is the same alone and within any larger product; 16 leaves a margin. Elementwise kernels end in
a scalar tail whose exponential rounds differently. Therefore the element count of a tensor must be a multiple of the
vector width, and models must not call kernels whose tail depends on the threads (`twinkle.nn.gated_mlp`).
"""

import math
from collections.abc import Iterable

import torch
from torch import Tensor

MIN_ROWS = 16
"""Minimum number of rows of a matrix product."""
_BLOCK_ROWS = {'cpu': 128}
"""Rows per block of the output head, by device type."""
_BLOCK_ROWS_OF_ACCELERATORS = 1024
"""Rows per block of the output head on other devices."""
ALIGNMENT_BYTES = 64
"""Alignment of a tensor's first element: torch's allocation alignment, one cache line."""
_VECTOR = 32
"""Elements per step of the widest elementwise vector loop (two AVX-512 registers)."""


def padded_row_count(row_count: int, widths: Iterable[int]) -> int:
    """Return the padded number of rows, chosen so that no tensor of the pass has a scalar tail.

    Args:
        row_count: rows with tokens.
        widths: column counts of the tensors that the model computes.
    """
    multiple = _VECTOR // math.gcd(_VECTOR, *widths)
    return -(-max(row_count, MIN_ROWS) // multiple) * multiple


def block_rows(device: torch.device) -> int:
    """Return the rows per block of the output head, which keep a block's logits to tens of megabytes."""
    return _BLOCK_ROWS.get(device.type, _BLOCK_ROWS_OF_ACCELERATORS)


def pad_rows(x: Tensor, row_count: int) -> Tensor:
    """Return `x` with zero rows appended up to `row_count`, or `x` itself if it has enough rows."""
    missing = row_count - x.shape[0]
    return x if missing <= 0 else torch.cat([x, x.new_zeros((missing, *x.shape[1:]))])


def is_stable(x: Tensor) -> bool:
    """Return whether a product with these rows is bitwise the same as with the rows at any other offset."""
    return x.shape[0] >= MIN_ROWS and x.data_ptr() % ALIGNMENT_BYTES == 0


def stable_rows(x: Tensor) -> Tensor:
    """Return `x` itself if `is_stable`, else a stable copy, padded with zero rows if it is short."""
    if x.shape[0] < MIN_ROWS:
        return pad_rows(x, MIN_ROWS)
    return x if is_stable(x) else x.clone()
