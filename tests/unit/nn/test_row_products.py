"""Tests of matrix products whose rows are independent of each other."""

import pytest
import torch

from twinkle.nn.cpu_facts import has_faster_onednn
from twinkle.nn.row_products import BlockedProducts, add_product, fast_product, product

ROWS = 700
"""Number of rows of the products with which shorter products are compared."""
SHAPES = [(64, 96), (576, 1536), (1536, 576), (2048, 192), (16, 576), (576, 2)]
"""Numbers of terms and columns. Kernels divide long sums, in ways that depend on the number of columns."""


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
    """A row has bitwise the same result in products of 16 or more rows and at any position."""
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
    """A bias and earlier values are added, and rows do not depend on other rows."""
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


@pytest.mark.parametrize('is_transposed', [False, True])
@pytest.mark.parametrize('has_bias', [False, True])
def test_fast_products_of_strided_operands_are_correct(*, is_transposed: bool, has_bias: bool) -> None:
    """Parts of larger tensors, in both layouts of the weights, have the products that torch computes."""
    rows, weight = operands(576, 192, torch.float32, is_transposed=is_transposed)
    bias = torch.arange(100.0) if has_bias else None
    rows, weight = rows[3:47, 7:300], weight[7:300, 11:111]
    expected = rows @ weight + (0.0 if bias is None else bias)
    torch.testing.assert_close(fast_product(rows, weight, bias), expected, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(fast_product(rows[:1], weight, bias), expected[:1], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('traced', ['rows', 'weight'])
def test_products_of_trained_tensors_have_gradients(traced: str) -> None:
    """The gradient of a product is the same as that of `torch.matmul`, for rows and for weights."""
    rows, weight = operands(64, 96, torch.float32, is_transposed=True)
    operand = {'rows': rows, 'weight': weight}[traced].requires_grad_()
    fast_product(rows, weight).square().sum().backward()
    found, operand.grad = operand.grad, None
    (rows @ weight).square().sum().backward()
    torch.testing.assert_close(found, operand.grad)


@pytest.mark.parametrize(
    ('cpu', 'is_faster'),
    [
        ('vendor_id : AuthenticAMD\nflags : avx2 avx512f avx512_bf16', True),
        ('vendor_id : AuthenticAMD\nflags : avx2', False),
        ('vendor_id : GenuineIntel\nflags : avx2 avx512f amx_bf16', False),
        ('', False),
    ],
)
def test_onednn_is_used_where_mkl_has_no_kernels_for_avx512(*, cpu: str, is_faster: bool) -> None:
    """MKL uses its kernels for AVX-512 only on CPUs of Intel."""
    assert has_faster_onednn(cpu) is is_faster


def test_sizes_do_not_depend_on_the_first_weights() -> None:
    """Products with zeros, such as a new adapter's factor B, do not determine how later weights are multiplied."""
    rows, weight = operands(1024, 1536, torch.bfloat16, is_transposed=True)
    add_product(torch.ones(300, 1536, dtype=torch.bfloat16), rows[:300], torch.zeros_like(weight), scaling=2.0)
    whole = torch.ones(ROWS, 1536, dtype=torch.bfloat16)
    add_product(whole, rows, weight, scaling=2.0)
    part = torch.ones(197, 1536, dtype=torch.bfloat16)
    add_product(part, rows[3:200], weight, scaling=2.0)
    assert torch.equal(part, whole[3:200])


class _SizedKernel:
    """A kernel that is correct for blocks of 128 rows and of the given sizes; other blocks get one wrong result."""

    def __init__(self, right_sizes: set[int]) -> None:
        self.right_sizes = right_sizes | {128}
        self.used: set[int] = set()

    def __call__(
        self, y_BN: torch.Tensor, x_BK: torch.Tensor, w_KN: torch.Tensor, *, beta: float, alpha: float
    ) -> None:
        """Replace `y` by `beta y + alpha x W`, with one wrong result in each block of another size."""
        self.used.add(len(y_BN))
        y_BN.mul_(beta).add_((x_BK[:, :, None] * w_KN[None]).sum(1), alpha=alpha)
        if len(y_BN) not in self.right_sizes:
            y_BN[-1, -1] += 1.0


@pytest.mark.parametrize('right_sizes', [set(), {16, 256}, {1024, 512, 256, 64, 16}])
@pytest.mark.parametrize('factors', [{}, {'beta': 0.0}, {'scaling': 2.0}])
def test_only_blocks_with_the_order_of_the_reference_are_used(right_sizes: set[int], factors: dict[str, float]) -> None:
    """Any number of rows is multiplied in blocks with correct results, and padding does not reach the result."""
    generator = torch.Generator().manual_seed(0)
    rows, weight = torch.randn(1700, 3, generator=generator), torch.randn(3, 512, generator=generator)
    kernel = _SizedKernel(right_sizes)
    blocked = BlockedProducts(kernel)
    blocked.add(torch.ones(2000, 512), torch.ones(2000, 3), weight, **factors)
    kernel.used.clear()
    beta, scaling = factors.get('beta', 1.0), factors.get('scaling', 1.0)
    for count in (1, 15, 16, 17, 127, 128, 129, 700, 1700):
        result = torch.ones(count, 512)
        blocked.add(result, rows[:count], weight, **factors)
        expected = torch.full((count, 512), beta) + scaling * (rows[:count, :, None] * weight[None]).sum(1)
        torch.testing.assert_close(result, expected)
    assert kernel.used <= kernel.right_sizes
