"""Matrix products in which each row is independent of the other rows."""

import pytest
import torch

from twinkle.nn.row_products import add_product, product

ROWS = 700
"""Number of rows of the products with which shorter ones are compared."""
SHAPES = [(64, 96), (576, 1536), (1536, 576), (2048, 192), (16, 576), (576, 2)]
"""Terms and columns. Kernels divide long sums, and choose other divisions for other numbers of columns."""


def operands(terms: int, columns: int, dtype: torch.dtype, *, is_transposed: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """Return random rows and weights; the weights are stored with contiguous columns if `is_transposed`."""
    generator = torch.Generator().manual_seed(terms + columns)
    rows = torch.randn(ROWS, terms, generator=generator).to(dtype)
    weight = torch.randn(columns, terms, generator=generator).to(dtype)
    return rows, weight.t() if is_transposed else weight.t().contiguous()


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize('is_transposed', [False, True])
@pytest.mark.parametrize(('terms', 'columns'), SHAPES)
def test_rows_do_not_depend_on_other_rows(terms, columns, dtype, is_transposed):
    """A row has the same bits in products of any other number of rows, from 16 on, and at any position."""
    rows, weight = operands(terms, columns, dtype, is_transposed=is_transposed)
    whole = product(rows, weight)
    for count in (16, 48, 64, 100, 128, 144, 320, 512, 652):
        for begin in (0, 16, 48):
            part = rows[begin : begin + count]
            assert torch.equal(product(part, weight), whole[begin : begin + count]), (count, begin)
    if dtype != torch.float32:
        assert torch.equal(product(rows[:100].t().contiguous().t(), weight), whole[:100])


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
@pytest.mark.parametrize('count', [16, 100, 300])
def test_products_are_added_in_place(dtype: torch.dtype, count: int) -> None:
    """A bias and earlier values are added, and the rows do not depend on other rows."""
    rows, weight = operands(576, 192, dtype, is_transposed=True)
    bias = torch.arange(192).to(dtype)
    expected = rows[:count].float() @ weight.float() + bias.float()
    torch.testing.assert_close(product(rows[:count], weight, bias).float(), expected, rtol=0.02, atol=0.5)
    whole = torch.ones(ROWS, 192, dtype=dtype)
    add_product(whole, rows, weight, scaling=0.5)
    part = torch.ones(count, 192, dtype=dtype)
    add_product(part, rows[:count], weight, scaling=0.5)
    assert torch.equal(part, whole[:count])
    torch.testing.assert_close(part.float(), 1.0 + 0.5 * rows[:count].float() @ weight.float(), rtol=0.02, atol=0.5)


def test_sizes_do_not_depend_on_the_first_weights() -> None:
    """Products with zeros, such as the factor B of a new adapter, do not decide how later weights are multiplied."""
    rows, weight = operands(1024, 1536, torch.bfloat16, is_transposed=True)
    add_product(torch.ones(300, 1536, dtype=torch.bfloat16), rows[:300], torch.zeros_like(weight), scaling=2.0)
    whole = torch.ones(ROWS, 1536, dtype=torch.bfloat16)
    add_product(whole, rows, weight, scaling=2.0)
    part = torch.ones(197, 1536, dtype=torch.bfloat16)
    add_product(part, rows[3:200], weight, scaling=2.0)
    assert torch.equal(part, whole[3:200])
