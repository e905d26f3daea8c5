"""Compares the grouped products, which accelerators use, with the loop over spans."""

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from twinkle.nn import LayerDropout, LoraFactors
from twinkle.nn.active_adapters import LayerSpan
from twinkle.nn.dropout import RowDropout
from twinkle.nn.grouped_lora import GroupedLora, is_groupable
from twinkle.nn.span_kernels import SpanLoop, kernel_for

ROWS, INPUTS, OUTPUTS = 70, 24, 40


def random_tensor(*shape: int, seed: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return random normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def random_spans() -> list[LayerSpan]:
    """Return spans of several ranks, one with dropout, and rows that belong to no span."""
    spans = []
    for index, (begin, end, rank) in enumerate([(2, 20, 3), (20, 41, 8), (48, 66, 11)]):
        a = random_tensor(rank, INPUTS, seed=index).requires_grad_()
        b = random_tensor(OUTPUTS, rank, seed=index + 10).requires_grad_()
        layer_dropout = LayerDropout(RowDropout(0.3, seed=5), layer=2) if index == 1 else None
        spans.append(LayerSpan(begin, end, LoraFactors(a, b, scaling=0.5 + index), layer_dropout))
    return spans


def run(kernel, dtype: torch.dtype, device: str = 'cpu') -> list[torch.Tensor]:
    """Return a kernel's output, input gradient and factor gradients."""
    spans = random_spans()
    for index, span in enumerate(spans):
        a, b = (tensor.detach().to(device).requires_grad_() for tensor in span.update.parameters())
        spans[index] = LayerSpan(span.begin_row, span.end_row, LoraFactors(a, b, span.update.scaling), span.dropout)
    x, dy = (random_tensor(ROWS, width, seed=9, dtype=dtype).to(device) for width in (INPUTS, OUTPUTS))
    y, dx = (random_tensor(ROWS, width, seed=8, dtype=dtype).to(device) for width in (OUTPUTS, INPUTS))
    with torch.no_grad():
        saved = kernel.add_output(spans, x, y)
        gradients = kernel.add_gradient(spans, x, dy, dx, saved)
    return [y, dx, *gradients]


def assert_near(own: list[torch.Tensor], expected: list[torch.Tensor], *, tolerance: float) -> None:
    """Assert equality within a fraction of each tensor's largest value."""
    for one, other in zip(own, expected, strict=True):
        bound = tolerance * float(other.abs().max())
        torch.testing.assert_close(one, other, atol=bound, rtol=0.0)


@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float32, 1e-5), (torch.bfloat16, 0.03)])
def test_grouped_products_equal_the_loop(dtype, tolerance):
    """Grouped products equal the loop for mixed ranks, gaps, dropout and scaling, forward and backward."""
    assert_near(run(GroupedLora(), dtype), run(SpanLoop(), dtype), tolerance=tolerance)


class _FromHost(TorchDispatchMode):
    """Counts the tensors that are created from host values; each creation waits for an accelerator."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += func is torch.ops.aten.lift_fresh.default
        return func(*args, **(kwargs or {}))


def test_layers_of_a_pass_share_the_end_rows() -> None:
    """The first layer copies the end rows of the groups to the device; later layers with the same spans reuse them."""
    counts = []
    for end in (53, 53, 52):
        factors = LoraFactors(random_tensor(8, INPUTS, seed=1), random_tensor(OUTPUTS, 8, seed=2), scaling=2.0)
        x, y = random_tensor(ROWS, INPUTS, seed=3), random_tensor(ROWS, OUTPUTS, seed=4)
        with _FromHost() as created, torch.no_grad():
            GroupedLora().add_output([LayerSpan(1, end, factors, None)], x, y)
        counts.append(created.count)
    assert counts == [1, 0, 1]


@pytest.mark.gpu
def test_grouped_products_equal_the_loop_on_an_accelerator():
    """Grouped products equal the loop when both run on an accelerator."""
    if not torch.cuda.is_available():
        pytest.skip('needs an accelerator')
    found = [run(kernel, torch.bfloat16, 'cuda') for kernel in (GroupedLora(), SpanLoop())]
    assert_near(found[0], found[1], tolerance=0.03)


def test_loop_runs_where_grouped_products_are_unsupported():
    """The loop runs on a CPU, for float32 rows, and for widths that are not multiples of 8."""
    spans = random_spans()
    assert isinstance(kernel_for(spans, random_tensor(ROWS, INPUTS, seed=1)), SpanLoop)
    assert not is_groupable(spans, random_tensor(ROWS, INPUTS, seed=1))
    assert is_groupable(spans, random_tensor(ROWS, INPUTS, seed=1, dtype=torch.bfloat16))
    odd = LoraFactors(random_tensor(3, 23, seed=1), random_tensor(OUTPUTS, 3, seed=2), scaling=1.0)
    assert not is_groupable([LayerSpan(0, 20, odd, None)], random_tensor(ROWS, 23, seed=1, dtype=torch.bfloat16))
