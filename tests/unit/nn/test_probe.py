"""Models are checked when they are loaded; configurations that would affect other tenants are refused."""

import json
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fixtures.architectures import build_tiny, check_as_accelerator
from fixtures.tiers import mostly_slow
from fixtures.tiny_model import build_tiny_model
from twinkle.nn import PackedCausalLM, UnsupportedModel
from twinkle.nn.attention import SEQUENCES_ARGUMENT
from twinkle.nn.float32_weights import float32_weights
from twinkle.nn.media import load_pretrained
from twinkle.nn.rows import MIN_ROWS
from twinkle.nn.sequences import PackedSequences

UNSUPPORTED: dict[str, dict[str, Any]] = {
    'dynamic': {'rope_parameters': {'rope_type': 'dynamic', 'factor': 2.0, 'rope_theta': 10000.0}},
    'chunked_attention': {'layer_types': ['chunked_attention', 'full_attention']},
    'linear_attention': {'layer_types': ['linear_attention', 'full_attention']},
}
"""Unsupported fields of a configuration, by a word of the error message."""
LEAKING = ('bert', 'bloom', 'mamba', 'recurrent_gemma', 'rwkv', 'xglm')
"""Architectures that mix sequences: encoders, biases by distance, recurrent layers, and positions over a pack."""
RIGHT = ('deepseek_v3', 'gemma3_text', 'qwen3', 'qwen3_5_text', 'qwen3_moe')
"""Correct architectures: latent attention, sliding windows, recurrent layers and mixtures of experts."""


@pytest.mark.parametrize('word', UNSUPPORTED)
def test_configuration_with_effects_beyond_the_check_is_refused(word: str, tmp_path: Path) -> None:
    """Layers and rotary embeddings that take effect only in long sequences are refused by their configuration."""
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


def test_prefixes_are_not_shared_if_results_would_differ(tmp_path: Path) -> None:
    """A model with a layer that ignores the rows of a prefix is loaded, but computes all rows."""

    def ignore_parents(model: Any) -> None:
        def separate(layer: Any, positional: Any, named: dict[str, Any]) -> Any:
            sequences = named.get(SEQUENCES_ARGUMENT)
            if sequences is None:
                # Transformers runs the unwrapped model first.
                return None
            spans = [replace(span, parent=None) for span in sequences.spans]
            return positional, {**named, SEQUENCES_ARGUMENT: PackedSequences.of(spans, next(layer.parameters()))}

        model.model.layers[0].self_attn.register_forward_pre_hook(separate, with_kwargs=True)

    folder = build_tiny_model(tmp_path / 'model', family='qwen3')
    assert PackedCausalLM.load(folder).can_share_prefixes
    assert not PackedCausalLM.load(folder, prepare=ignore_parents).can_share_prefixes
    assert not PackedCausalLM.load(folder, dtype='bfloat16', prepare=ignore_parents).can_share_prefixes


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        (KeyError('twinkle'), UnsupportedModel),
        (torch.OutOfMemoryError('no memory'), torch.OutOfMemoryError),
    ],
)
def test_failure_of_a_model_is_a_refusal(error: Exception, expected: type[Exception], tmp_path: Path) -> None:
    """An exception in a model's code becomes a refusal that names the model; an out-of-memory error does not."""

    def fail(*_: object) -> None:
        raise error

    def break_layer(model: Any) -> None:
        model.model.layers[0].self_attn.register_forward_hook(fail)

    with pytest.raises(expected, match=r'no memory|LlamaForCausalLM .* failed with KeyError'):
        PackedCausalLM.load(build_tiny_model(tmp_path / 'model'), prepare=break_layer)


@pytest.mark.parametrize('dtype', ['bfloat16', 'float16'])
@pytest.mark.parametrize('model_type', mostly_slow(['qwen3', 'qwen3_5_text', 'qwen3_moe']))
def test_half_precision_is_admitted(model_type: str, dtype: str, tmp_path: Path) -> None:
    """A correct model is not refused for its rounding in half precision."""
    build_tiny(model_type, tmp_path)
    assert PackedCausalLM.load(tmp_path, dtype=dtype).dtype_name == dtype


@pytest.mark.parametrize('model_type', LEAKING)
def test_half_precision_hides_no_unsupported_model(model_type: str, tmp_path: Path) -> None:
    """Architectures that are refused in float32 are also refused in bfloat16."""
    build_tiny(model_type, tmp_path)
    with pytest.raises(UnsupportedModel):
        PackedCausalLM.load(tmp_path, dtype='bfloat16')


@pytest.mark.parametrize('dtype', mostly_slow(['bfloat16', 'float32']))
@pytest.mark.parametrize('model_type', [*LEAKING, *RIGHT])
def test_accelerators_admit_the_same_models(model_type: str, dtype: str, tmp_path: Path) -> None:
    """The checks for an accelerator, which tolerate rounding, accept correct models and refuse models that leak."""
    build_tiny(model_type, tmp_path)
    with refusal_of(model_type):
        check_as_accelerator(tmp_path, dtype=dtype)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason='needs an accelerator')
@pytest.mark.parametrize('dtype', ['bfloat16', 'float16', 'float32'])
@pytest.mark.parametrize('model_type', [*LEAKING, *RIGHT])
def test_an_accelerator_admits_the_same_models(model_type: str, dtype: str, tmp_path: Path) -> None:
    """A model on an accelerator is accepted if it is correct, and refused if it mixes sequences."""
    build_tiny(model_type, tmp_path)
    with refusal_of(model_type):
        PackedCausalLM.load(tmp_path, dtype=dtype, device='cuda')


@pytest.mark.parametrize('is_bitwise', [True, False])
@pytest.mark.parametrize('is_backward', [False, True])
def test_leaks_below_every_tolerance_are_found(is_backward: bool, is_bitwise: bool, tiny_llama_dir: Path) -> None:  # noqa: FBT001
    """A leak between sequences below the rounding of bfloat16 is found, even if it affects only gradients."""

    def leak(layer: object, arguments: object, output: torch.Tensor) -> torch.Tensor:
        del layer, arguments
        if not is_backward:
            return mixed(output)
        if output.requires_grad:
            output.register_hook(mixed)
        return output

    check = partial(check_as_accelerator, tiny_llama_dir, dtype='bfloat16', is_precise=False, is_bitwise=is_bitwise)
    check(hook=None)
    with pytest.raises(UnsupportedModel, match=f'{"gradients" if is_backward else "results"} of a sequence depend'):
        check(hook=leak)


@pytest.mark.parametrize(
    ('rows', 'finding'), [(slice(70, 75), 'a pack differs'), (slice(75, 108), 'a pack differs'), (0, 'decoding')]
)
def test_errors_in_a_few_rows_are_found(rows: slice | int, finding: str, tiny_llama_dir: Path) -> None:
    """An error in one sequence or in one decoded token is found even if all other rows are correct."""

    def disturb(layer: object, arguments: object, output: torch.Tensor) -> torch.Tensor:
        del layer, arguments
        if rows == 0 and output.shape[1] > MIN_ROWS:
            return output
        output[:, rows] += output.std() * torch.randn(output.shape[-1], generator=torch.Generator().manual_seed(0))
        return output

    with pytest.raises(UnsupportedModel, match=finding):
        check_as_accelerator(
            tiny_llama_dir,
            dtype='bfloat16',
            is_precise=False,
            hook=disturb,
        )


def test_weights_are_float32_only_in_the_layer_that_runs(tiny_llama_dir: Path) -> None:
    """A model computes in float32 one layer at a time, and its weights are restored after an error."""
    model: Any = load_pretrained(tiny_llama_dir, dtype=torch.bfloat16)
    model.set_attn_implementation('eager')
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    seen: list[list[torch.dtype]] = []

    def record(*_: object) -> None:
        seen.append([layer.mlp.up_proj.weight.dtype for layer in model.model.layers])

    def fail(*_: object) -> None:
        raise RuntimeError

    for layer in model.model.layers:
        layer.mlp.register_forward_hook(record)
    ids, half, full = torch.arange(3, 20)[None], torch.bfloat16, torch.float32
    with float32_weights(model):
        assert model(ids).logits.dtype == full
    assert seen == [[full, half], [half, full]]
    model.model.layers[1].mlp.register_forward_hook(fail)
    with pytest.raises(RuntimeError), float32_weights(model):
        model(ids)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def mixed(rows: torch.Tensor) -> torch.Tensor:
    """Return rows [1, tokens, width] with one percent of the previous row added to each row."""
    return rows + 0.01 * rows.roll(1, dims=1)


def refusal_of(model_type: str) -> AbstractContextManager[object]:
    """Return a context that expects a refusal of architectures that mix sequences, and no error otherwise."""
    return nullcontext() if model_type in RIGHT else pytest.raises(UnsupportedModel, match='is not supported')


def edited(folder: Path, fields: dict[str, Any]) -> Path:
    """Change fields of a model's configuration and return its folder."""
    file = folder / 'config.json'
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    return folder
