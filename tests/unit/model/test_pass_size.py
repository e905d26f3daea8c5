"""Tests of the number of rows of a pass on a GPU: the estimate covers the measured memory and grows with the GPU."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from twinkle.data_format import InputFeature, LoraConfig
from twinkle.model.dry_run.live_bytes import peak_bytes
from twinkle.model.engine import TrainerEngine
from twinkle.model.pass_size import MAX_ROWS, MIN_ROWS, PassMemory, PassSize
from twinkle.nn import PackedCausalLM

SHAPE: dict[str, Any] = {
    'hidden_size': 64,
    'intermediate_size': 192,
    'num_hidden_layers': 4,
    'num_attention_heads': 4,
    'num_key_value_heads': 2,
    'head_dim': 16,
    'vocab_size': 320,
    'max_position_embeddings': 512,
    'pad_token_id': 0,
}
QWEN3_8B = {
    'model_type': 'qwen3',
    'hidden_size': 4096,
    'intermediate_size': 12288,
    'num_hidden_layers': 36,
    'vocab_size': 151_936,
    'torch_dtype': 'bfloat16',
}
GIB = 1 << 30


def _peak(model: PackedCausalLM, count: int) -> int:
    """Return the peak memory of a pass of `count` sequences of 64 tokens, in bytes."""
    engine = TrainerEngine(model, max_pass_tokens=4096)
    engine.create_adapter('a', LoraConfig(r=8, seed=0))
    engine.set_loss('a', 'CrossEntropyLoss')
    ids = np.random.default_rng(0).integers(3, 300, (count, 64))
    features = [InputFeature(input_ids=row, labels=row) for row in ids]
    engine.forward_backward('a', features)
    with peak_bytes(torch.device('cpu')) as peak:
        engine.forward_backward('a', features)
    engine.delete_adapter('a')
    return peak.value


@pytest.mark.parametrize(
    ('config', 'dtype'), [(transformers.Qwen3Config, 'float32'), (transformers.Gemma3TextConfig, 'bfloat16')]
)
def test_estimate_covers_the_measured_memory_of_a_row(config: Any, dtype: str, tmp_path: Path) -> None:
    """Rows take at most the estimated memory and at least a third of it, with and without recomputed activations."""
    transformers.AutoModelForCausalLM.from_config(config(**SHAPE)).save_pretrained(tmp_path)
    memory = PassMemory.of(tmp_path, dtype=dtype)
    for is_checkpointed, estimate in ((False, memory.stored), (True, memory.recomputed)):
        model = PackedCausalLM.load(tmp_path, dtype=dtype, is_checkpointed=is_checkpointed)
        measured = (_peak(model, 24) - _peak(model, 8)) / (16 * 64)
        assert estimate / 3 < measured < estimate, is_checkpointed


def _memory(
    folder: Path, config: dict[str, Any], *, weight_bytes: int, dtype: str = 'bfloat16', copies: float = 1.0
) -> PassMemory:
    (folder / 'config.json').write_text(json.dumps(config))
    with (folder / 'model.safetensors').open('wb') as file:
        file.truncate(weight_bytes)
    return PassMemory.of(folder, dtype=dtype, copies=copies)


def test_passes_grow_with_the_memory(tmp_path: Path) -> None:
    """An 8B model recomputes activations on a GPU of 80 GiB and not on a larger GPU; a small GPU is refused."""
    memory = _memory(tmp_path, QWEN3_8B, weight_bytes=16 * GIB)
    with pytest.raises(ValueError, match=r'need 2\d\.\d GiB on the GPU; this process has 8\.0 GiB'):
        memory.pass_size(8 * GIB)
    assert memory.pass_size(24 * GIB) == PassSize(MIN_ROWS, is_checkpointed=True)
    assert memory.pass_size(28 * GIB) == PassSize(4096, is_checkpointed=True)
    assert memory.pass_size(80 * GIB) == PassSize(MAX_ROWS, is_checkpointed=True)
    assert not memory.pass_size(400 * GIB).is_checkpointed


def test_weights_count_in_their_type_and_part(tmp_path: Path) -> None:
    """Weights loaded in float32 take twice the memory of stored bfloat16 weights; divided weights take half of it."""
    stored = _memory(tmp_path, QWEN3_8B, weight_bytes=16 * GIB).fixed
    doubled = _memory(tmp_path, QWEN3_8B, weight_bytes=16 * GIB, dtype='float32').fixed
    divided = _memory(tmp_path, QWEN3_8B, weight_bytes=16 * GIB, copies=0.5).fixed
    assert doubled - stored == 16 * GIB
    assert stored - divided == 8 * GIB


def test_only_the_experts_of_a_row_count(tmp_path: Path) -> None:
    """A mixture of experts needs memory for the chosen experts only; a nested text configuration is read."""
    mixture = {**QWEN3_8B, 'intermediate_size': 1, 'moe_intermediate_size': 768, 'num_experts_per_tok': 8}
    mixture['model_type'] = 'qwen3_moe'
    dense = {**QWEN3_8B, 'intermediate_size': 6144}
    nested = {'model_type': 'gemma3', 'text_config': {**dense, 'model_type': 'gemma3_text'}}
    stored = {_memory(tmp_path, config, weight_bytes=1).stored for config in (mixture, dense, nested)}
    assert len(stored) == 1


def test_defaults_of_the_configuration_count(tmp_path: Path) -> None:
    """Sizes that are missing in config.json have the defaults of transformers."""
    config = {name: value for name, value in QWEN3_8B.items() if name != 'vocab_size'}
    assert _memory(tmp_path, config, weight_bytes=1) == _memory(tmp_path, QWEN3_8B, weight_bytes=1)
