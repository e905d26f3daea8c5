"""Compares fused norms and gates with the modules that they replace."""

import pytest
import torch
import transformers
from torch import nn
from transformers.activations import ACT2FN
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma4.modeling_gemma4 import Gemma4RMSNorm
from transformers.models.llama.modeling_llama import LlamaMLP, LlamaRMSNorm

from twinkle.nn.fused_layers import fuse_layers
from twinkle.nn.gated_mlp import GatedMLP, fused_mlp
from twinkle.nn.rms_norm import FusedRMSNorm, fused_norm


def config_of(width: int, **fields: str) -> transformers.LlamaConfig:
    """Return the configuration of a gated layer with this width."""
    return transformers.LlamaConfig(hidden_size=width, intermediate_size=width + 4, num_attention_heads=1, **fields)


def compare(fused: nn.Module, reference: nn.Module, x: torch.Tensor) -> None:
    """Assert that both modules give the same values and gradients of input and parameters."""
    found = []
    for module in (fused, reference):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        weights = torch.linspace(-1.0, 1.0, y.numel()).reshape(y.shape)
        parameters = list(reference.parameters())
        found.append([y, *torch.autograd.grad((y * weights).sum(), [leaf, *parameters])])
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, atol=1e-5 * float(other.detach().abs().max()), rtol=1e-4)


@pytest.mark.parametrize('kind', [LlamaRMSNorm, GemmaRMSNorm])
def test_norm_equals_the_replaced_module(kind):
    """Values, input gradient and weight gradient of a fused norm equal those of the replaced module."""
    norm = kind(48, eps=1e-5)
    nn.init.normal_(norm.weight, generator=torch.Generator().manual_seed(0))
    fused = fused_norm(norm)
    assert list(fused.parameters()) == [norm.weight]
    compare(fused, norm, torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1)))


def test_norm_without_a_weight_equals_the_replaced_module():
    """Values and input gradient of a norm without a weight equal those of the replaced module."""
    norm = Gemma4RMSNorm(48, eps=1e-5, with_scale=False)
    fused = fused_norm(norm)
    assert list(fused.parameters()) == []
    compare(fused, norm, torch.randn(2, 7, 48, generator=torch.Generator().manual_seed(1)))


@pytest.mark.parametrize('activation', ['silu', 'gelu_pytorch_tanh'])
def test_gated_layer_equals_the_replaced_module(activation):
    """Values and gradients of a fused gated layer equal those of the replaced module, even for large gate values."""
    torch.manual_seed(0)
    mlp = LlamaMLP(config_of(32, hidden_act=activation))
    compare(fused_mlp(mlp), mlp, 20 * torch.randn(3, 5, 32, generator=torch.Generator().manual_seed(1)))


def test_extreme_gates_stay_finite():
    """A gate whose exponential overflows has the limits of value and gradient instead of NaN."""
    torch.manual_seed(0)
    fused = fused_mlp(LlamaMLP(config_of(4)))
    gate, up = torch.tensor([-1e4, -200.0, 0.0, 1e4]).requires_grad_(), torch.ones(4)
    output = fused.gate.apply(gate, up)
    (gradient,) = torch.autograd.grad(output.sum(), gate)
    assert output.tolist() == [0.0, 0.0, 0.0, 1e4]
    assert gradient.tolist() == [0.0, 0.0, 0.5, 1.0]


def test_modules_with_other_functions_are_not_replaced():
    """A norm with an extra operation and a gate with another activation are not replaced."""

    class ShiftedRMSNorm(LlamaRMSNorm):
        def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
            return super().forward(hidden_states) + 0.5

    mlp = LlamaMLP(config_of(8))
    mlp.act_fn = ACT2FN['relu']
    assert (fused_norm(ShiftedRMSNorm(8)), fused_mlp(mlp), fused_norm(nn.LayerNorm(8))) == (None, None, None)


def test_all_norms_and_gates_of_a_model_are_replaced(tiny_qwen3_dir):
    """The norms of layers, heads and the output, and every gated layer, are replaced."""
    model = transformers.AutoModelForCausalLM.from_pretrained(tiny_qwen3_dir)
    fuse_layers(model)
    found = list(model.modules())
    fused = [module for module in found if isinstance(module, FusedRMSNorm)]
    assert len(fused) == 2 * 4 + 1
    assert sum(isinstance(module, GatedMLP) for module in found) == 2
    remaining = {module for module in found if type(module).__name__ == 'Qwen3RMSNorm'}
    assert remaining == {module.source for module in fused}
