"""Settings of CPU libraries that make each row of a matrix product independent of the other rows.

On Intel CPUs, MKL and oneDNN choose a kernel by the number of rows, so the bits of a row depend on the other rows. The
strict mode of MKL's reproducible results prevents this without a measured cost. oneDNN has no such mode, but only its
kernels for AMX depend on the number of rows; `twinkle.nn.row_products` runs them in blocks (docs/LOG.md).

MKL reads its environment variable at the first product of the process. If the program has already computed a product,
MKL keeps its setting.
"""

import os
from collections.abc import Callable

import torch
from torch import Tensor

from twinkle.infra import get_logger
from twinkle.nn.cpu_facts import cpu_text

_VARIABLE = 'MKL_CBWR'
"""Environment variable that selects MKL's mode of reproducible results."""
_ROWS = 256
"""Number of rows of the tested products."""
_SHAPE = (1536, 576)
"""Inputs and outputs of a product whose rows depend on each other with the default settings of Intel CPUs."""


def choose_reproducible_kernels() -> None:
    """Select kernels whose rows are independent, and log a warning if rows of float32 products remain dependent.

    The variable MKL_CBWR is respected if it is set. Otherwise it is set only while the library reads it, so child
    processes do not inherit it.
    """
    is_set = 'GenuineIntel' in cpu_text() and _VARIABLE not in os.environ
    if is_set:
        os.environ[_VARIABLE] = 'AUTO,STRICT'
    try:
        is_independent = has_independent_rows()
    finally:
        if is_set:
            del os.environ[_VARIABLE]
    if not is_independent:
        get_logger().warning(
            'rows of a product depend on each other on this CPU, so the results of a batch depend on other batches in '
            'its passes; import twinkle.nn before the first product of the program, and leave MKL_CBWR unset'
        )


def has_independent_rows() -> bool:
    """Return whether rows of float32 test products are bitwise the same if fewer other rows are computed with them."""
    inputs, outputs = _SHAPE
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_ROWS, inputs, generator=generator)
    weight = torch.randn(outputs, inputs, generator=generator)
    swapped_x, swapped_weight = x[:, :outputs].contiguous(), weight.T.contiguous()
    pairs = ((x, weight), (swapped_x, swapped_weight))
    return all(torch.equal((a @ b.T)[:count], a[:count].clone() @ b.T) for a, b in pairs for count in (16, 17, 64))


def has_padded_sums(terms: int, padded: int, *, matmul: Callable[[Tensor, Tensor], Tensor] = torch.matmul) -> bool:
    """Return whether zeros at the end of float32 sums leave their bits unchanged.

    Sums of `terms` terms and fewer, in steps of 16, are compared with the same sums padded to `terms` and to `padded`.

    Args:
        terms: number of terms up to which sums are not padded, a multiple of 16.
        padded: number of terms to which longer sums are padded.
        matmul: product to test.
    """
    generator = torch.Generator().manual_seed(0)
    x, weight = torch.randn(32, padded, generator=generator), torch.randn(padded, 64, generator=generator)
    for length in range(16, terms + 1, 16):
        own = x * (torch.arange(padded) < length)
        sums = [matmul(own[:, :count].contiguous(), weight[:count]) for count in (length, terms, padded)]
        if not all(torch.equal(sums[0], other) for other in sums[1:]):
            return False
    return True
