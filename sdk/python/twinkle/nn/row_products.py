"""Matrix products in which each row is bitwise independent of the other rows.

On CPUs with AMX, the order in which oneDNN adds the terms of a half-precision product depends on the number of rows.
On these CPUs, such products run in blocks of rows, with sizes that all give the same order. Where oneDNN multiplies
float32 faster than MKL, it computes these products too. A row is then rounded differently only if it is the only one
(docs/LOG.md).

Legend: R rows, B rows of a block, K terms of a sum, N columns.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from twinkle.nn.cpu_facts import cpu_text, has_amx, has_faster_onednn
from twinkle.nn.rows import pad_rows

_REFERENCE_ROWS = 128
"""Number of rows of the reference block. Blocks of other sizes must add terms in the same order."""
_SIZES = (1024, 512, 256, _REFERENCE_ROWS, 64, 16)
"""Possible sizes of a block. Large blocks are faster, and small blocks need less padding."""
_TESTED_SUMS = 1 << 20
"""Number of random sums that are compared to find out whether a size has the order of the reference. A different order
changes about one of ten thousand sums, because most differences disappear when the sum is rounded to half precision."""
_MIN_TESTED_COLUMNS = 512
"""Minimum number of columns for blocks of other sizes; with fewer, the test would take many rows."""
_MAX_TESTED_WEIGHTS = 1 << 26
"""Maximum size of a matrix for blocks of other sizes; the test needs a second matrix of this size."""
_HALF = (torch.bfloat16, torch.float16)


class BlockedProducts:
    """Products in blocks of rows, whose sizes all add the terms of a sum in the same order.

    Args:
        kernel: function that replaces `y` [B, N] by `beta y + alpha x W` in place, as `torch.Tensor.addmm_` does. Its
            result for a row may depend on the number of rows B, but not on the contents of the other rows.
    """

    def __init__(self, kernel: Callable[..., object] = torch.Tensor.addmm_) -> None:
        self._kernel = kernel
        self._known_orders: dict[tuple[object, ...], bool] = {}
        """Whether blocks of a size have the order of the reference, by size and kind of product."""

    def add(self, y_RN: Tensor, x_RK: Tensor, weight_KN: Tensor, *, beta: float = 1.0, scaling: float = 1.0) -> None:
        """Replace `y_RN` by `beta y + scaling x W`, block by block."""
        x_RK = _with_contiguous_rows(x_RK)
        limit, begin = max(x_RK.shape[0], _REFERENCE_ROWS), 0
        factors = {'beta': beta, 'alpha': scaling}
        sizes = [
            size for size in _SIZES if size <= limit and self._has_order_of_reference(size, x_RK, weight_KN, factors)
        ]
        while begin < x_RK.shape[0]:
            remaining = x_RK.shape[0] - begin
            size = next((size for size in sizes if size <= remaining), sizes[-1])
            y_BN, x_BK = y_RN[begin : begin + size], x_RK[begin : begin + size]
            if size <= remaining:
                self._kernel(y_BN, x_BK, weight_KN, **factors)
            else:
                padded_BN = pad_rows(y_BN, size)
                self._kernel(padded_BN, pad_rows(x_BK, size), weight_KN, **factors)
                y_BN.copy_(padded_BN[:remaining])
            begin += size

    def _has_order_of_reference(self, size: int, x_RK: Tensor, weight_KN: Tensor, factors: dict[str, float]) -> bool:
        """Return whether blocks of `size` rows add terms in the order of the reference; each kind is tested once."""
        is_tested = weight_KN.shape[1] >= _MIN_TESTED_COLUMNS and weight_KN.numel() <= _MAX_TESTED_WEIGHTS
        if size == _REFERENCE_ROWS or not is_tested:
            return size == _REFERENCE_ROWS
        is_scaled = factors['alpha'] != 1.0
        layout = weight_KN.shape, weight_KN.stride(0) == 1, x_RK.dtype
        key = (size, *layout, factors['beta'], is_scaled, torch.get_num_threads())
        if key not in self._known_orders:
            trial_count = -(-_TESTED_SUMS // (max(size, _REFERENCE_ROWS) * weight_KN.shape[1]))
            generator = torch.Generator().manual_seed(0)
            # The weight itself is not used, because it may be zero, like the factor B of a new adapter.
            random_KN = torch.empty_strided(weight_KN.shape, weight_KN.stride(), dtype=weight_KN.dtype)
            random_KN.normal_(generator=generator)
            trials = (self._is_equal_in_trial(size, random_KN, factors, generator) for _ in range(trial_count))
            self._known_orders[key] = all(trials)
        return self._known_orders[key]

    def _is_equal_in_trial(
        self, size: int, weight_KN: Tensor, factors: dict[str, float], generator: torch.Generator
    ) -> bool:
        """Return whether blocks of random rows have the results of blocks of the reference's size."""
        count, (terms, columns) = max(size, _REFERENCE_ROWS), weight_KN.shape
        x_RK = torch.randn(count, terms, generator=generator).to(weight_KN.dtype)
        y_RN = torch.randn(count, columns, generator=generator).to(weight_KN.dtype)
        own_RN, expected_RN = y_RN.clone(), y_RN.clone()
        for rows, result_RN in ((size, own_RN), (_REFERENCE_ROWS, expected_RN)):
            for y_BN, x_BK in zip(result_RN.split(rows), x_RK.split(rows), strict=True):
                self._kernel(y_BN, x_BK, weight_KN, **factors)
        return torch.equal(own_RN, expected_RN)


_IN_BLOCKS = frozenset(('cpu', dtype) for dtype in _HALF if has_amx(cpu_text()))
"""Device types and dtypes of products that run in blocks of rows."""
_HAS_ONEDNN = torch.backends.mkldnn.is_available() and has_faster_onednn(cpu_text())
IN_ONEDNN = frozenset([('cpu', torch.float32)] if _HAS_ONEDNN else [])
"""Device types and dtypes of products for which oneDNN is called, where torch would call MKL."""
_BLOCKED = BlockedProducts()


def needs_blocks(x: Tensor) -> bool:
    """Return whether products with these rows run in blocks."""
    return (x.device.type, x.dtype) in _IN_BLOCKS


def is_special(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> bool:
    """Return whether `product` has other results or another speed than `torch.nn.functional.linear`.

    False for a weight or a bias that is trained, because its gradient is left to torch. Pass the parameters themselves:
    without gradients enabled, parts of trained parameters do not require gradients.
    """
    is_trained = weight.requires_grad or (bias is not None and bias.requires_grad)
    return not is_trained and (x.device.type, x.dtype) in _IN_BLOCKS | IN_ONEDNN


def product(x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return [R, N], `x W + bias`. If autograd traces the call, its backward pass has no blocks."""
    if not needs_blocks(x_RK):
        return fast_product(_with_contiguous_rows(x_RK), weight_KN, bias_N)
    shape = x_RK.shape[0], weight_KN.shape[1]
    if bias_N is None:
        y_RN = x_RK.new_empty(shape)
        _BLOCKED.add(y_RN, x_RK, weight_KN, beta=0.0)
    else:
        y_RN = bias_N.expand(shape).clone()
        _BLOCKED.add(y_RN, x_RK, weight_KN)
    return y_RN


def fast_product(x_RK: Tensor, weight_KN: Tensor, bias_N: Tensor | None = None) -> Tensor:
    """Return [R, N], `x W + bias`, with the kernel that `product` uses if it does not divide the rows into blocks."""
    is_trained = x_RK.requires_grad or weight_KN.requires_grad or (bias_N is not None and bias_N.requires_grad)
    if (x_RK.device.type, x_RK.dtype) in IN_ONEDNN and not (is_trained and torch.is_grad_enabled()):
        # Torch has this operator for compiled graphs, without a gradient; no public function calls oneDNN for float32.
        return torch.ops.mkldnn._linear_pointwise(x_RK, weight_KN.t(), bias_N, 'none', [], '')  # noqa: SLF001
    return x_RK @ weight_KN if bias_N is None else torch.addmm(bias_N, x_RK, weight_KN)


def add_product(y_RN: Tensor, x_RK: Tensor, weight_KN: Tensor, *, scaling: float) -> None:
    """Add `scaling x W` to `y_RN` in place. If autograd traces the call, its backward pass has no blocks."""
    if needs_blocks(x_RK):
        _BLOCKED.add(y_RN, x_RK, weight_KN, scaling=scaling)
    else:
        y_RN.addmm_(_with_contiguous_rows(x_RK), weight_KN, alpha=scaling)


def _with_contiguous_rows(x_RK: Tensor) -> Tensor:
    """Return the rows in the layout for which kernels of half precision add the terms of a sum in one order."""
    is_right = x_RK.dtype not in _HALF or x_RK.device.type != 'cpu' or x_RK.stride(1) == 1
    return x_RK if is_right else x_RK.contiguous()
