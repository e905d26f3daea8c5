"""A GGUF file is converted to the Hugging Face folder of its original model."""

import json
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType, GGUFWriter
from gguf.quants import quantize
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from twinkle.hub.gguf_folder import convert_llama

HIDDEN, HEADS, KV_HEADS = 32, 4, 2
TOKENS = ['<|endoftext|>', '<|im_start|>', '<|im_end|>', 'a', 'b', '1', 'Ġ', 'ab']


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """The converted folder of a one-layer model."""
    source = tmp_path / 'model.gguf'
    write_gguf(source)
    target = tmp_path / 'hf'
    target.mkdir()
    convert_llama(source, target, lambda stage, *, done, total: None)
    return target


def write_gguf(path: Path) -> None:
    """Write a one-layer Llama model like llama.cpp: with interleaved q and k rows and one quantized matrix."""
    writer = GGUFWriter(path, 'llama')
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(64)
    writer.add_block_count(1)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_context_length(128)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_token_list(TOKENS)
    writer.add_token_types([3, 3, 3, 1, 1, 1, 1, 1])
    writer.add_token_merges(['a b'])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(2)
    writer.add_unk_token_id(0)
    writer.add_chat_template('{{ messages }}')
    for name, weight in original().items():
        writer.add_tensor(name, weight)
    down = np.ones((HIDDEN, 64), dtype=np.float32)
    packed = quantize(down, GGMLQuantizationType.Q8_0)
    writer.add_tensor('blk.0.ffn_down.weight', packed, raw_dtype=GGMLQuantizationType.Q8_0)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def original() -> dict[str, np.ndarray]:
    """Return the unquantized tensors by GGUF name."""
    q_rows = interleaved(np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN), HEADS)
    return {
        'token_embd.weight': np.eye(len(TOKENS), HIDDEN, dtype=np.float32),
        'output_norm.weight': np.full(HIDDEN, 2, dtype=np.float32),
        'blk.0.attn_q.weight': q_rows,
    }


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """Return the rows with the two halves of each head interleaved, like the converter of llama.cpp."""
    return weight.reshape(heads, 2, weight.shape[0] // heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def test_weights_have_their_names_order_and_type(folder: Path) -> None:
    """Rotary rows are reordered, quantized values are dequantized, and all weights are float32."""
    weights = load_file(folder / 'model.safetensors')
    expected = np.arange(HIDDEN * HIDDEN, dtype=np.float32).reshape(HIDDEN, HIDDEN)
    np.testing.assert_array_equal(weights['model.layers.0.self_attn.q_proj.weight'], expected)
    np.testing.assert_allclose(weights['model.layers.0.mlp.down_proj.weight'], 1.0, atol=1e-3)
    assert {weight.dtype for weight in weights.values()} == {np.dtype(np.float32)}


def test_config_describes_the_model(folder: Path) -> None:
    """Sizes come from the file, and a file without an output head gives tied embeddings."""
    config = json.loads((folder / 'config.json').read_text())
    assert config['num_key_value_heads'] == KV_HEADS
    assert config['head_dim'] == HIDDEN // HEADS
    assert config['tie_word_embeddings'] is True
    assert config['rms_norm_eps'] == 1e-5


def test_tokenizer_merges_and_keeps_special_tokens(folder: Path) -> None:
    """The tokenizer merges pairs and does not split special tokens."""
    tokenizer = Tokenizer.from_file(str(folder / 'tokenizer.json'))
    assert tokenizer.encode('<|im_start|>ab1').ids == [1, 7, 5]
