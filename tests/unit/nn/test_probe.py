"""Models are checked when they are loaded: configurations that would harm other tenants are refused by name."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.architectures import build_tiny
from fixtures.tiny_model import build_tiny_model
from twinkle.nn import PackedCausalLM, UnsupportedModel

UNSUPPORTED: dict[str, dict[str, Any]] = {
    'dynamic': {'rope_parameters': {'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 10000.0}},
    'chunked_attention': {'layer_types': ['chunked_attention', 'full_attention']},
    'linear_attention': {'layer_types': ['linear_attention', 'full_attention']},
}
"""Fields of a configuration, by a word of the refusal."""


@pytest.mark.parametrize('word', UNSUPPORTED)
def test_configuration_with_effects_beyond_the_check_is_refused(word: str, tmp_path: Path) -> None:
    """Layers and rotary embeddings that mix long sequences are refused, although short ones pass the check."""
    folder = edited(build_tiny_model(tmp_path / 'model', family='qwen3'), UNSUPPORTED[word])
    with pytest.raises(UnsupportedModel, match=f"Qwen3ForCausalLM .*'qwen3'.* is not supported: .*{word}"):
        PackedCausalLM.load(folder)


def test_sliding_window_longer_than_the_check_is_checked(tmp_path: Path) -> None:
    """A model whose layers ignore the sliding window of its configuration is refused."""

    def ignore_windows(model: Any) -> None:
        windows: list[int] = []

        def hide(attention: Any, _: object) -> None:
            windows.append(attention.config.sliding_window)
            attention.config.sliding_window = None

        def restore(attention: Any, *_: object) -> None:
            attention.config.sliding_window = windows.pop()

        for layer in model.model.layers:
            layer.self_attn.register_forward_pre_hook(hide)
            layer.self_attn.register_forward_hook(restore)

    folder = edited(build_tiny_model(tmp_path / 'model'), {'model_type': 'mistral', 'sliding_window': 256})
    assert PackedCausalLM.load(folder).config.sliding_window == 256
    with pytest.raises(UnsupportedModel, match='a pack differs from transformers'):
        PackedCausalLM.load(folder, prepare=ignore_windows)


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (KeyError('twinkle'), UnsupportedModel),
        (torch.OutOfMemoryError('no memory'), torch.OutOfMemoryError),
    ],
)
def test_failure_of_a_model_is_a_refusal(error: Exception, expected: type[Exception], tmp_path: Path) -> None:
    """An exception in the code of a model is named, and running out of memory is not a refusal."""

    def fail(*_: object) -> None:
        raise error

    def break_layer(model: Any) -> None:
        model.model.layers[0].self_attn.register_forward_hook(fail)

    with pytest.raises(expected, match=r'no memory|LlamaForCausalLM .* failed with KeyError'):
        PackedCausalLM.load(build_tiny_model(tmp_path / 'model'), prepare=break_layer)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('model_type', ['qwen3', 'qwen3_5_text', 'qwen3_moe'])
def test_half_precision_is_admitted(model_type: str, dtype: str, tmp_path: Path) -> None:
    """Rounding in half precision is no reason to refuse a model."""
    build_tiny(model_type, tmp_path)
    assert PackedCausalLM.load(tmp_path, dtype=dtype).dtype_name == dtype


@pytest.mark.parametrize('model_type', ['bloom', 'xglm', 'recurrent_gemma', 'bert'])
def test_half_precision_hides_no_unsupported_model(model_type: str, tmp_path: Path) -> None:
    """Architectures that are refused in float32 are refused in bfloat16, too."""
    build_tiny(model_type, tmp_path)
    with pytest.raises(UnsupportedModel):
        PackedCausalLM.load(tmp_path, dtype='bfloat16')


def edited(folder: Path, fields: dict[str, Any]) -> Path:
    """Change fields of a model's configuration and return its folder."""
    file = folder / 'config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder
