"""Parts of a linear layer on several ranks give the outputs and gradients of the whole layer."""

import pytest
import torch
from torch import Tensor, nn

from twinkle.data_format import LoraConfig
from twinkle.nn import AdapterSpan, FullWeights, LoraWeights, RowDropout, UnsupportedModel
from twinkle.nn.active_adapters import ActiveAdapters, LayerSpan, Pass
from twinkle.nn.layer_shard import LayerShard
from twinkle.nn.lora_linear import LoraLinear

INPUTS, OUTPUTS, ROWS, RANKS = 24, 48, 32, 3
PATH = 'layer'


@pytest.fixture
def weights() -> LoraWeights:
    """Adapter with two random factors."""
    config = LoraConfig(r=4, target_modules=(PATH,), lora_dropout=0.5)
    found = LoraWeights.create({PATH: (INPUTS, OUTPUTS)}, config, seed=1, is_trainable=True)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in found.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return found


@pytest.mark.parametrize('dropout', [None, RowDropout(0.5, seed=7)], ids=['no dropout', 'dropout'])
@pytest.mark.parametrize('axis', [0, 1], ids=['outputs', 'inputs'])
def test_parts_give_the_whole_layer(weights: LoraWeights, axis: int, dropout: RowDropout | None) -> None:
    """The outputs and gradients of all parts, joined or added, equal those of the whole layer."""
    generator = torch.Generator().manual_seed(3)
    whole = nn.Linear(INPUTS, OUTPUTS, bias=False).requires_grad_(requires_grad=False)
    x = torch.randn(ROWS, INPUTS, generator=generator)
    gradient = torch.randn(ROWS, OUTPUTS, generator=generator)
    expected = _run(whole, x, gradient, weights, dropout, shard=None)
    parts: list[list[Tensor]] = []
    for rank in range(RANKS):
        size = (OUTPUTS, INPUTS)[axis] // RANKS
        own = slice(rank * size, (rank + 1) * size)
        linear = nn.Linear(1, 1, bias=False, device='meta')
        linear.weight = nn.Parameter(whole.weight[own] if axis == 0 else whole.weight[:, own], requires_grad=False)
        shard = LayerShard(axis, own, input_count=INPUTS)
        own_x, own_gradient = (x, gradient[:, own]) if axis == 0 else (x[:, own], gradient)
        parts.append(_run(linear, own_x.contiguous(), own_gradient.contiguous(), weights, dropout, shard=shard))
    outputs, by_inputs, *by_parameters = zip(*parts, strict=True)
    found = [
        torch.cat(outputs, dim=1) if axis == 0 else sum(outputs),
        sum(by_inputs) if axis == 0 else torch.cat(by_inputs, dim=1),
        *(sum(parts) for parts in by_parameters),
    ]
    for own, other in zip(found, expected, strict=True):
        torch.testing.assert_close(own, other, rtol=1e-5, atol=1e-4)


def test_other_weights_than_lora_are_refused() -> None:
    """A part of a layer refuses updates other than that of a LoRA adapter."""
    shard = LayerShard(0, slice(0, 1), input_count=INPUTS)
    with pytest.raises(UnsupportedModel, match='only LoRA adapters'):
        shard.span(LayerSpan(0, 1, FullWeights, None))


def _run(
    linear: nn.Linear,
    x: Tensor,
    gradient: Tensor,
    weights: LoraWeights,
    dropout: RowDropout | None,
    *,
    shard: LayerShard | None,
) -> list[Tensor]:
    """Return the output of a layer, and the gradients of its input and of the adapter."""
    active = ActiveAdapters()
    layer = LoraLinear(linear, path=PATH, layer=0, active=active, shard=shard)
    x = x.clone().requires_grad_()
    with active.activate(Pass([AdapterSpan(0, ROWS, weights, dropout)], row_count=ROWS)):
        output = layer(x)
    return [output.detach(), *torch.autograd.grad(output, [x, *weights.parameters()], gradient)]
