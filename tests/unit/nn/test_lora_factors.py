"""Compares an update's hand-written forward and backward pass with autograd, and checks a layer's autograd graph."""

import pytest
import torch
from torch import Tensor, nn

from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, LayerDropout, LoraFactors, LoraWeights
from twinkle.nn.active_adapters import ActiveAdapters, Pass
from twinkle.nn.dropout import RowDropout
from twinkle.nn.lora_linear import LoraLinear

ROWS, INPUTS, OUTPUTS, RANK, SCALING = 33, 20, 28, 5, 0.7
DROPOUT = LayerDropout(RowDropout(0.25, seed=3), layer=1)


def random_tensor(*shape: int, seed: int) -> Tensor:
    """Return random normal values."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def by_hand(dtype: torch.dtype, layer_draw: LayerDropout | None) -> list[Tensor]:
    """Return output, input gradient and factor gradients of `LoraFactors`; the gradients start from zeros."""
    factors = LoraFactors(
        *(random_tensor(*shape, seed=1).requires_grad_() for shape in ((RANK, INPUTS), (OUTPUTS, RANK))), SCALING
    )
    x, dy = random_tensor(ROWS, INPUTS, seed=2).to(dtype), random_tensor(ROWS, OUTPUTS, seed=3).to(dtype)
    y, dx = torch.zeros(ROWS, OUTPUTS, dtype=dtype), torch.zeros(ROWS, INPUTS, dtype=dtype)
    with torch.no_grad():
        saved = factors.add_output(x, y, layer_draw)
        gradients = factors.add_gradient(x, dy, dx, saved, layer_draw)
    return [y.float(), dx.float(), *gradients]


def by_autograd(layer_draw: LayerDropout | None) -> list[Tensor]:
    """Return the same values, computed by torch's autograd in float32."""
    a, b = (random_tensor(*shape, seed=1).requires_grad_() for shape in ((RANK, INPUTS), (OUTPUTS, RANK)))
    x = random_tensor(ROWS, INPUTS, seed=2).requires_grad_()
    dropped = x if layer_draw is None else x * layer_draw.mask(x.detach())
    y = SCALING * (dropped @ a.t() @ b.t())
    return [y.detach(), *torch.autograd.grad(y, [x, a, b], random_tensor(ROWS, OUTPUTS, seed=3))]


@pytest.mark.parametrize('layer_draw', [None, DROPOUT], ids=['plain', 'dropout'])
@pytest.mark.parametrize(('dtype', 'tolerance'), [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
def test_update_and_gradients_equal_autograd(layer_draw, dtype, tolerance):
    """Output and gradients equal those of autograd, including for 16-bit rows; factor gradients are always float32."""
    own, expected = by_hand(dtype, layer_draw), by_autograd(layer_draw)
    assert [tensor.dtype for tensor in own[2:]] == [torch.float32, torch.float32]
    for one, other in zip(own, expected, strict=True):
        torch.testing.assert_close(one, other, atol=tolerance * float(other.abs().max()), rtol=0.0)


def test_dropout_is_the_same_on_every_call_and_differs_by_layer_and_pass():
    """A dropout mask is reproducible, and differs between layers and between passes."""
    x, generator = torch.ones(50, 40), torch.Generator().manual_seed(0)
    first, second = RowDropout.sample(0.25, generator), RowDropout.sample(0.25, generator)
    assert torch.equal(first.mask(x, layer=3), first.mask(x, layer=3))
    assert not torch.equal(first.mask(x, layer=3), first.mask(x, layer=4))
    assert not torch.equal(first.mask(x, layer=3), second.mask(x, layer=3))
    assert first.mask(x, layer=3).unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert float(first.mask(x, layer=3).mean()) == pytest.approx(1.0, abs=0.05)


def test_layer_is_one_autograd_node_for_any_number_of_adapters():
    """A layer is one autograd node whose inputs include the factors of all adapters."""
    active = ActiveAdapters()
    layer = LoraLinear(nn.Linear(INPUTS, OUTPUTS).requires_grad_(False), path='m', layer=0, active=active)
    adapters = [
        LoraWeights.create({'m': (INPUTS, OUTPUTS)}, LoraConfig(r=2), seed=seed, is_trainable=True) for seed in range(4)
    ]
    spans = [AdapterSpan(20 * index, 20 * index + 20, adapter) for index, adapter in enumerate(adapters)]
    x = random_tensor(80, INPUTS, seed=0).requires_grad_()
    with active.activate(Pass(spans, row_count=80)):
        y = layer(x)
    # The rows of the input and the result are views.
    ((layer_node, _),) = y.grad_fn.next_functions
    edges = [node for node, _ in layer_node.next_functions if node is not None]
    assert [type(node).__name__ for node in edges] == ['ViewBackward0', *['AccumulateGrad'] * 8]


@pytest.mark.parametrize('has_bias', [False, True])
def test_result_can_be_changed_in_place(has_bias):
    """Clamping a layer's result in place, as models with clipped projections do, gives the usual gradient."""
    active = ActiveAdapters()
    base = nn.Linear(INPUTS, OUTPUTS, bias=has_bias).requires_grad_(False)
    layer = LoraLinear(base, path='m', layer=0, active=active)
    adapter = LoraWeights.create({'m': (INPUTS, OUTPUTS)}, LoraConfig(r=2), seed=0, is_trainable=True)
    gradients = []
    for is_in_place in (True, False):
        x = random_tensor(20, INPUTS, seed=0)[None].requires_grad_()
        with active.activate(Pass([AdapterSpan(0, 20, adapter)], row_count=20)):
            y = layer(x)
        y = y.clamp_(-0.1, 0.1) if is_in_place else y.clamp(-0.1, 0.1)
        gradients.append(torch.autograd.grad(y.sum(), x)[0])
    assert torch.equal(*gradients)
    assert gradients[0].any()


@pytest.mark.parametrize('rank', [1, 2, 16])
def test_gradients_do_not_depend_on_the_layout_of_their_rows(rank):
    """Factor gradients are bitwise the same in large and small passes if output gradients are stored by column."""
    active = ActiveAdapters()
    layer = LoraLinear(nn.Linear(4, 4).requires_grad_(False), path='m', layer=0, active=active)
    adapter = LoraWeights.create({'m': (4, 4)}, LoraConfig(r=rank), seed=0, is_trainable=True)
    own_x, own_gradient = random_tensor(35, 4, seed=0), random_tensor(35, 4, seed=1)
    found = []
    for row_count, first in ((72, 21), (64, 0), (35, 0)):
        x, by_output = random_tensor(row_count, 4, seed=2), random_tensor(row_count, 4, seed=3)
        rows = slice(first, first + 35)
        x[rows], by_output[rows] = own_x, own_gradient
        spans = [AdapterSpan(first, first + 35, adapter)]
        with active.activate(Pass(spans, row_count=row_count)):
            y = layer(x)
        found.append(torch.autograd.grad(y, list(adapter.parameters()), by_output.t().contiguous().t()))
    for other in found[1:]:
        assert all(torch.equal(*pair) for pair in zip(found[0], other, strict=True))


def test_frozen_factors_get_no_gradient():
    """A factor that requires no gradient has the gradient `None`."""
    factors = LoraFactors(
        random_tensor(RANK, INPUTS, seed=1), random_tensor(OUTPUTS, RANK, seed=2).requires_grad_(), SCALING
    )
    with torch.no_grad():
        saved = factors.add_output(random_tensor(ROWS, INPUTS, seed=3), random_tensor(ROWS, OUTPUTS, seed=4), None)
        gradients = factors.add_gradient(
            random_tensor(ROWS, INPUTS, seed=3), random_tensor(ROWS, OUTPUTS, seed=4), None, saved, None
        )
    assert gradients[0] is None
    assert gradients[1].shape == (OUTPUTS, RANK)


@pytest.mark.parametrize('rank', [1, 2, 3, 8])
def test_rows_are_bitwise_independent_of_the_span_length(rank):
    """A row's output is bitwise independent of the length of the span that contains it."""
    factors = LoraFactors(random_tensor(rank, 64, seed=1), random_tensor(OUTPUTS, rank, seed=2), SCALING)
    x, y = random_tensor(100, 64, seed=3), random_tensor(100, OUTPUTS, seed=4)
    whole = y.clone()
    factors.add_output(x, whole, None)
    for begin, end in ((0, 17), (5, 36), (50, 99)):
        part = y[begin:end].clone()
        factors.add_output(x[begin:end].clone(), part, None)
        assert torch.equal(part, whole[begin:end])
