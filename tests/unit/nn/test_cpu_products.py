"""Tests of the settings of CPU libraries that make the rows of a product independent of each other."""

import os

import pytest
import torch

from twinkle.nn.cpu_products import has_independent_rows, has_padded_sums
from twinkle.nn.sequences import KEY_BLOCK, UNSPLIT_KEYS


def test_rows_of_products_are_independent() -> None:
    """A row of a float32 product does not depend on the number of rows."""
    assert has_independent_rows()


def test_child_processes_do_not_inherit_the_setting() -> None:
    """The environment variable is set only while the library reads it."""
    assert 'MKL_CBWR' not in os.environ


def test_zeros_leave_sums_of_attention_unchanged() -> None:
    """The key counts without padding, and padded keys, give equal sums of attention on this CPU."""
    assert has_padded_sums(UNSPLIT_KEYS, KEY_BLOCK)


@pytest.mark.parametrize('limit', [192, 176, 64])
def test_sums_in_other_parts_are_found(limit: int) -> None:
    """A kernel that halves sums with more terms than its limit is correct only up to the limit."""

    def halved(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        """Multiply; halve sums with more terms than the limit if they have fewer than 512 terms."""
        terms = len(weight)
        first = terms if terms <= limit else terms // 2 if terms < 512 else limit
        return x[:, :first] @ weight[:first] + x[:, first:] @ weight[first:]

    assert has_padded_sums(192, 512, matmul=halved) == (limit == 192)
