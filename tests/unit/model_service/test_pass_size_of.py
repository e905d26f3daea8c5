"""The model service chooses the size of its passes for its device, unless the configuration sets a size."""

from pathlib import Path

import pytest
import torch

from twinkle.model.pass_size import PassSize
from twinkle_services.model.assembly import pass_size_of
from twinkle_services.model.config import ModelConfig


def _config(**fields: object) -> ModelConfig:
    return ModelConfig.model_validate({'base_model': 'a', 'checkpoint_address': 'b:1', **fields})


def test_passes_on_a_cpu_have_1024_rows() -> None:
    """Passes on a CPU have 1024 rows and store all activations, unless the configuration sets other values."""
    assert pass_size_of(_config()) == PassSize(1024, is_checkpointed=False)
    assert pass_size_of(_config(pass_tokens=64)) == PassSize(64, is_checkpointed=False)
    assert pass_size_of(_config(activation_checkpointing=True)) == PassSize(1024, is_checkpointed=True)


def test_configured_sizes_need_no_gpu() -> None:
    """If the rows and the checkpointing of activations are configured, neither the GPU nor the model is read."""
    config = _config(device='cuda', pass_tokens=4096, activation_checkpointing=False)
    assert pass_size_of(config) == PassSize(4096, is_checkpointed=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason='needs a machine without a GPU')
def test_missing_gpu_is_refused_by_name(tiny_llama_dir: Path) -> None:
    """The error for a configured but missing GPU names the device and the solution."""
    with pytest.raises(ValueError, match=r"device 'cuda:0': torch finds no GPU .* use device 'cpu'"):
        pass_size_of(_config(base_model=str(tiny_llama_dir), device='cuda:0'))
