"""Frozen weights in four bits: loss values, isolation of adapters, and restored weights, which are not kept."""

import itertools
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from pydantic import ValidationError
from torch import nn

from fixtures import isolation
from twinkle.data_format import InputFeature, LoraConfig
from twinkle.infra import DeviceMesh
from twinkle.model import TransformersModel
from twinkle.model.engine import TrainerEngine
from twinkle.model.engine.mesh_engine import EngineOptions, load_on_mesh
from twinkle.nn import PackedCausalLM, UnsupportedModel
from twinkle.nn.four_bit import FourBitLinear, FourBitWeight, quantize
from twinkle.nn.lora_linear import AdaptedLinear
from twinkle_services.model.config import ModelConfig

LOSS_TOLERANCE = 0.05
"""Maximum difference of a random tiny model's loss from its loss with the original weights, relative to the loss."""


def _loaded(folder: Path, dtype: str = 'float32') -> PackedCausalLM:
    return PackedCausalLM.load(folder, dtype=dtype, prepare=partial(quantize, device=torch.device('cpu')))


def _losses(model: PackedCausalLM) -> list[float]:
    """Return the mean losses of four steps on the same batch."""
    engine = TrainerEngine(model)
    engine.create_adapter('a', LoraConfig(r=8, lora_alpha=16, seed=0))
    engine.set_loss('a', 'CrossEntropyLoss')
    engine.set_optimizer('a', 'AdamW', lr=2e-2)
    ids = np.random.default_rng(0).integers(3, 250, (4, 25))
    features = [InputFeature(input_ids=row[:-1], labels=row[1:]) for row in ids]
    losses: list[float] = []
    for _ in range(4):
        losses.append(engine.forward_backward('a', features).loss)
        engine.step('a')
    engine.delete_adapter('a')
    return losses


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
def test_losses_are_close_to_those_of_the_original_weights(tiny_qwen3_dir: Path, dtype: str) -> None:
    """Every step has nearly the same loss as with the original weights, and the loss falls."""
    original = _losses(PackedCausalLM.load(tiny_qwen3_dir, dtype=dtype))
    quantized = _losses(_loaded(tiny_qwen3_dir, dtype))
    assert quantized[-1] < quantized[0]
    assert quantized != original
    np.testing.assert_allclose(quantized, original, rtol=LOSS_TOLERANCE)


@pytest.mark.parametrize('dtype', [torch.float32, torch.bfloat16])
def test_restored_weights_are_the_nearest_of_sixteen_levels(dtype: torch.dtype) -> None:
    """Each block of 64 weights is restored to sixteen multiples of its largest magnitude, in the original type."""
    weight = torch.randn(48, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    packed = FourBitWeight(weight)
    restored = packed.restored()
    assert restored.dtype == dtype
    assert torch.equal(packed.restored(), restored)
    levels = (restored.float() / weight.float().abs().amax(1, keepdim=True)).mul(1e2).round().unique()
    assert len(levels) <= 2 * 16
    assert (restored - weight).float().norm() < 0.12 * weight.float().norm()
    assert packed.byte_count == weight.numel() // 2 + 4 * 48


def test_results_of_an_adapter_do_not_depend_on_the_pass(tiny_qwen3_dir: Path) -> None:
    """An adapter gets bitwise the same results alone and in a mix."""
    model = _loaded(tiny_qwen3_dir)
    assert list(itertools.chain.from_iterable(isolation.violations(model, seed, longest=60) for seed in range(2))) == []


def test_isolation_holds_for_widths_without_whole_vectors(tmp_path: Path) -> None:
    """Passes are also padded for the widths of four-bit weights, so that no tensor ends in a scalar tail."""
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=72,
        intermediate_size=100,
        num_hidden_layers=2,
        num_attention_heads=3,
        num_key_value_heads=1,
        head_dim=24,
        vocab_size=333,
        max_position_embeddings=256,
        pad_token_id=0,
    )
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    original, quantized = PackedCausalLM.load(tmp_path), _loaded(tmp_path)
    assert quantized.padded_count(17) == original.padded_count(17)
    assert list(isolation.violations(quantized, 0, longest=60)) == []


def test_restored_weights_are_not_kept_for_the_backward_pass() -> None:
    """A product stores its weight in four bits only; the gradient of its input is that of the restored weight."""
    layer = nn.Linear(64, 32)
    packed = FourBitWeight(layer.weight.detach())
    x = torch.randn(20, 64, requires_grad=True)
    kept: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        y: torch.Tensor = AdaptedLinear.apply(x, packed, None, ())
    assert sum(tensor.numel() for tensor in kept) < x.numel()
    y.backward(torch.ones_like(y))
    torch.testing.assert_close(x.grad, torch.ones_like(y) @ packed.restored())


def test_quantized_model_counts_all_of_its_weights(tiny_qwen3_dir: Path) -> None:
    """The number of parameters includes four-bit weights; only these are missing in the stored parameters."""
    original, quantized = PackedCausalLM.load(tiny_qwen3_dir), _loaded(tiny_qwen3_dir)
    assert quantized.parameter_count == original.parameter_count
    missing = original.base_parameters.keys() - quantized.base_parameters.keys()
    assert missing == {name for name in original.base_parameters if name.endswith('_proj.weight')}
    assert not any('lm_head' in name or 'embed' in name for name in missing)
    layers = [module for module in quantized.backbone.modules() if isinstance(module, FourBitLinear)]
    assert len(layers) == len(missing)


def test_unsupported_uses_are_refused(tiny_qwen3_dir: Path) -> None:
    """The error for an unknown format, an unsupported combination or training of four-bit weights names the cause."""
    options = partial(EngineOptions, device='cpu', max_pass_tokens=64)
    with pytest.raises(ValueError, match="quantization must be 'nf4' or None, got 'int3'"):
        load_on_mesh(tiny_qwen3_dir, None, options(quantization='int3'))
    with pytest.raises(ValueError, match='quantization does not compose with fsdp'):
        load_on_mesh(tiny_qwen3_dir, DeviceMesh.from_sizes(fsdp_size=2), options(quantization='nf4'))
    engine = load_on_mesh(tiny_qwen3_dir, None, options(quantization='nf4'), dtype='float32')
    with pytest.raises(UnsupportedModel, match='weights in four bits cannot be trained'):
        engine.create_full_adapter('run')
    for field in ({'mesh': {'fsdp': 2}}, {'backend': 'megatron'}, {'full_parameters': True}):
        with pytest.raises(ValidationError, match='quantization: not supported with'):
            ModelConfig.model_validate({'base_model': 'a', 'checkpoint_address': 'b:1', 'quantization': 'nf4', **field})


def test_components_load_weights_in_four_bits(tiny_qwen3_dir: Path) -> None:
    """A trainer with `mixed_precision` 'nf4' has weights in four bits; its other weights are bfloat16."""
    model = TransformersModel(str(tiny_qwen3_dir), mixed_precision='nf4', device='cpu').engine.model
    assert model.is_quantized
    assert model.dtype_name == 'bfloat16'


def test_weights_in_four_bits_are_not_exported(tiny_qwen3_dir: Path) -> None:
    """An export of the base model or of merged weights is refused; the adapter alone is exported."""
    model = TransformersModel(str(tiny_qwen3_dir), mixed_precision='nf4', device='cpu')
    model.add_adapter_to_model('a', LoraConfig(r=2, seed=0))
    for export in (model.export_base, partial(model.export_weights, merge_lora=True)):
        with pytest.raises(UnsupportedModel, match='weights in four bits cannot be exported'):
            export()
    assert model.export_weights().manifest.tensors
