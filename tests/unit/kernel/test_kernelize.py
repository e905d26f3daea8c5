"""Tests that kernels are installed in a model, called, and removed again."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaMLP

from twinkle.data_format import LoraConfig
from twinkle.kernel import (
    DEFAULT_KERNEL_CONFIG,
    OPERATIONS,
    KernelChoice,
    KernelError,
    hub,
    kernelize,
    kernelized,
    kernels_of,
    unkernelize,
)
from twinkle.model import TransformersModel
from twinkle.nn import AdapterSpan, PackedCausalLM, SequenceSpan
from twinkle.nn.gated_mlp import fused_mlp
from twinkle.plugin import PluginRefused, allow_plugins

IDS = torch.arange(12) + 3


@pytest.fixture
def model(tiny_qwen3_dir) -> PackedCausalLM:
    """A model with norms and gates."""
    return PackedCausalLM.load(tiny_qwen3_dir)


def hidden(model: PackedCausalLM) -> Tensor:
    """Return the model's hidden states for a sequence."""
    count = len(IDS)
    positions = torch.arange(count)
    with torch.no_grad():
        return model.hidden(IDS, positions, sequences=[SequenceSpan(0, count)], adapters=[AdapterSpan(0, count, None)])


class CountingKernel:
    """Kernel that computes a different function and records its calls."""

    def __init__(self) -> None:
        self.shapes: list[torch.Size] = []

    def __call__(self, x: Tensor, weight: Tensor, eps: float, offset: float) -> Tensor:
        """Return the norm times two."""
        self.shapes.append(x.shape)
        return 2 * nn.functional.rms_norm(x, weight.shape, weight + offset, eps)


def test_kernel_runs_in_every_layer_until_it_is_removed(model):
    """An installed kernel changes the results; removing it restores them bitwise."""
    plain, kernel = hidden(model), CountingKernel()
    assert kernelize(model, {'rms_norm': kernel}) is model
    assert not torch.equal(hidden(model), plain)
    norms = [layer for layer in model.kernel_layers if layer.operation == 'rms_norm']
    assert len(kernel.shapes) == len(norms) > 4
    assert kernels_of(model)['rms_norm'] is kernel
    unkernelize(model)
    assert torch.equal(hidden(model), plain)
    assert len(kernel.shapes) == len(norms)


def test_reference_is_bitwise_the_default(model):
    """Selecting the reference, or the defaults on a CPU, gives bitwise the same results."""
    plain = hidden(model)
    for mapping in (dict.fromkeys(('rms_norm', 'swiglu'), 'torch'), DEFAULT_KERNEL_CONFIG):
        kernelize(model, mapping)
        assert torch.equal(hidden(model), plain)
        assert set(kernels_of(model)) == {'rms_norm', 'swiglu'}


def test_block_restores_the_previous_kernels(model):
    """A `kernelized` block restores the previous kernels when it raises."""
    outer, inner = CountingKernel(), CountingKernel()
    kernelize(model, {'rms_norm': outer})

    def fail_inside() -> None:
        with kernelized(model, {'rms_norm': inner}):
            hidden(model)
            raise KeyError

    with pytest.raises(KeyError):
        fail_inside()
    assert inner.shapes
    assert kernels_of(model)['rms_norm'] is outer


@pytest.mark.parametrize(
    'mapping',
    [
        {'rms_norm': 'liger'},
        {'rms_norm': 'cuda'},
        {'rotary': 'torch'},
        {'geglu': 'torch'},
        {'rms_norm': KernelChoice(('liger',))},
        {'rms_norm': nn.RMSNorm(4)},
    ],
)
def test_unusable_kernel_is_refused_and_changes_nothing(model, mapping):
    """A mapping with a kernel that cannot run is refused as a whole and changes nothing."""
    with pytest.raises(KernelError, match=next(iter(mapping))):
        kernelize(model, {'swiglu': lambda gate, up: gate, **mapping})
    assert set(kernels_of(model).values()) == {None}


def test_invalid_choices_are_refused():
    """An empty list of backends, an unknown backend and an object without a model are refused."""
    for make in (lambda: KernelChoice(()), lambda: KernelChoice(('abacus',)), lambda: kernelize(object())):
        with pytest.raises(KernelError):
            make()


def test_gelu_layer_uses_the_geglu_kernel():
    """A layer with a tanh-approximated gelu gate uses the `geglu` kernel, and `PLAIN` has a kernel per operation."""
    mlp = gelu_layer()
    x = torch.randn(3, 8, generator=torch.Generator().manual_seed(1))
    plain = mlp(x)
    with kernelized(mlp, {'geglu': PLAIN['geglu']}):
        torch.testing.assert_close(mlp(x), plain)
    with kernelized(mlp, {'geglu': lambda gate, up: 0 * up}):
        assert mlp(x).count_nonzero() == 0
    assert set(OPERATIONS) == set(PLAIN)


def gelu_layer() -> nn.Module:
    """Return a gated layer with a gelu gate."""
    torch.manual_seed(0)
    sizes = {'hidden_size': 8, 'intermediate_size': 24, 'num_attention_heads': 1}
    fused = fused_mlp(LlamaMLP(LlamaConfig(hidden_act='gelu_pytorch_tanh', **sizes)))
    assert fused is not None
    return fused


@pytest.mark.parametrize('operation', ['rms_norm', 'swiglu'])
def test_training_uses_a_kernel(tiny_qwen3_dir, operation):
    """A trainer runs on replaced kernels, and its losses equal the reference's within rounding."""
    losses = [training_losses(tiny_qwen3_dir, {}), training_losses(tiny_qwen3_dir, {operation: PLAIN[operation]})]
    torch.testing.assert_close(torch.tensor(losses[1]), torch.tensor(losses[0]), rtol=1e-3, atol=1e-3)
    assert losses[0][0] > losses[0][-1]


def training_losses(folder, mapping: dict[str, Any]) -> list[float]:
    """Return the losses of four training steps."""
    feature = {'input_ids': list(range(3, 15)), 'labels': list(range(4, 16))}
    trainer = TransformersModel(str(folder))
    kernelize(trainer, mapping)
    trainer.add_adapter_to_model('a', LoraConfig(r=4, target_modules='all-linear', seed=7))
    trainer.set_optimizer('AdamW', lr=0.02)
    losses = []
    for _ in range(4):
        losses.append(float(trainer.forward_backward(feature)['loss']))
        trainer.clip_grad_and_step()
    return losses


PLAIN = {
    'rms_norm': lambda x, weight, eps, offset: nn.functional.rms_norm(x, weight.shape, weight + offset, eps),
    'swiglu': lambda gate, up: nn.functional.silu(gate) * up,
    'geglu': lambda gate, up: nn.functional.gelu(gate, approximate='tanh') * up,
}


def test_a_kernel_of_a_plugin_runs_if_the_plugin_is_allowed(model, tmp_path, monkeypatch):
    """`hub` loads a function of an allowed plugin by name, and refuses other plugins and malformed names."""
    monkeypatch.setenv('TWINKLE_PLUGINS', '')
    code = 'import torch\ndef norm(x, weight, eps, offset):\n    return torch.zeros_like(x)\n'
    (tmp_path / '__init__.py').write_text(code)
    with pytest.raises(PluginRefused):
        hub(f'{tmp_path}:norm')
    allow_plugins(str(tmp_path))
    with kernelized(model, {'rms_norm': hub(f'{tmp_path}:norm')}):
        assert hidden(model).count_nonzero() == 0
    for invalid_name in ('norm', f'{tmp_path}:', ':norm', f'{tmp_path}:a b'):
        with pytest.raises(KernelError):
            hub(invalid_name)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='Liger runs on a CUDA device')
@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_liger_equals_the_reference(tiny_qwen3_dir, dtype):
    """Values and gradients of Liger's kernels equal the reference within the rounding of the dtype."""
    pytest.importorskip('liger_kernel')
    model = PackedCausalLM.load(tiny_qwen3_dir, dtype=dtype, device='cuda')
    tolerance = 8 * torch.finfo(getattr(torch, dtype)).eps
    for layer in [*model.kernel_layers, gelu_layer().to('cuda', getattr(torch, dtype))]:
        width = layer.weight.shape[0] if layer.operation == 'rms_norm' else layer.gate_proj.in_features
        x = torch.randn(9, width, device='cuda', dtype=getattr(torch, dtype))
        results = []
        for mapping in ({layer.operation: 'torch'}, {layer.operation: 'liger'}):
            leaf = x.clone().requires_grad_()
            kernelize(layer, mapping)
            y = layer(leaf)
            results.append([y, *torch.autograd.grad(y.square().sum(), leaf)])
        for reference, liger in zip(*results, strict=True):
            scale = float(reference.detach().abs().max())
            torch.testing.assert_close(liger, reference, rtol=tolerance, atol=tolerance * scale)
