"""Convert a Llama model in a GGUF file to a Hugging Face folder, without torch or transformers."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from gguf import GGUFReader
from gguf.quants import dequantize
from safetensors.numpy import save_file  # pyright: ignore[reportUnknownVariableType]
from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE

from twinkle.hub.progress import Report

Array = npt.NDArray[Any]

_CONTROL_TOKEN = 3
"""Token type of special tokens in GGUF files."""

_LAYER_PARTS = {
    'attn_norm': 'input_layernorm',
    'attn_q': 'self_attn.q_proj',
    'attn_k': 'self_attn.k_proj',
    'attn_v': 'self_attn.v_proj',
    'attn_output': 'self_attn.o_proj',
    'ffn_norm': 'post_attention_layernorm',
    'ffn_gate': 'mlp.gate_proj',
    'ffn_up': 'mlp.up_proj',
    'ffn_down': 'mlp.down_proj',
}
"""Name of each part of a layer in transformers, by its name in GGUF files."""
_OTHER_PARTS = {'token_embd': 'model.embed_tokens', 'output_norm': 'model.norm', 'output': 'lm_head'}
"""Name of each part outside of the layers in transformers, by its name in GGUF files."""


def convert_llama(source: Path, folder: Path, report: Report) -> None:
    """Write the config, float32 weights, tokenizer and chat template of `source` to `folder`.

    The config names bfloat16, the type of the model before it was quantized, so that `twinkle.nn.chosen_dtype` may
    select this type.

    Args:
        source: a GGUF file of architecture `llama` with a byte-level BPE tokenizer of type `smollm`.
        folder: an existing folder; files with the same names are overwritten.
        report: called after each tensor.

    Raises:
        KeyError: the file lacks a required field of a Llama model.
    """
    reader = GGUFReader(source)
    fields = {name: field.contents for name, field in reader.fields.items()}
    config = _config(fields)
    weights: dict[str, Array] = {}
    for index, tensor in enumerate(reader.tensors):
        weight = dequantize(tensor.data, tensor.tensor_type).astype(np.float32, copy=False)
        if '.attn_q.' in tensor.name:
            weight = _rows_to_halves(weight, heads=config['num_attention_heads'])
        elif '.attn_k.' in tensor.name:
            weight = _rows_to_halves(weight, heads=config['num_key_value_heads'])
        weights[_hf_name(tensor.name)] = np.ascontiguousarray(weight)
        report('converting to float32', done=index + 1, total=len(reader.tensors))
    config['tie_word_embeddings'] = 'lm_head.weight' not in weights
    report('writing the folder', done=0, total=1)
    save_file(weights, folder / 'model.safetensors', metadata={'format': 'pt'})
    _write_json(folder / 'config.json', config)
    token_ids = {name: config[name] for name in ('bos_token_id', 'eos_token_id', 'pad_token_id')}
    _write_json(folder / 'generation_config.json', token_ids)
    _write_tokenizer(folder, fields, config)
    report('writing the folder', done=1, total=1)


def _hf_name(name: str) -> str:
    parts = name.split('.')
    if parts[0] == 'blk':
        return f'model.layers.{parts[1]}.{_LAYER_PARTS[parts[2]]}.{parts[3]}'
    return f'{_OTHER_PARTS[parts[0]]}.{parts[1]}'


def _rows_to_halves(weight: Array, *, heads: int) -> Array:
    """Undo GGUF's row order for rotary embeddings: from (pair, half) to (half, pair) within each head."""
    pairs = weight.shape[0] // heads // 2
    return weight.reshape(heads, pairs, 2, -1).swapaxes(1, 2).reshape(weight.shape)


def _config(fields: dict[str, Any]) -> dict[str, Any]:
    hidden_size = fields['llama.embedding_length']()
    heads = fields['llama.attention.head_count']()
    rope_theta = fields['llama.rope.freq_base']()
    return {
        'architectures': ['LlamaForCausalLM'],
        'model_type': 'llama',
        'hidden_size': hidden_size,
        'intermediate_size': fields['llama.feed_forward_length'](),
        'num_hidden_layers': fields['llama.block_count'](),
        'num_attention_heads': heads,
        'num_key_value_heads': fields['llama.attention.head_count_kv'](),
        'head_dim': hidden_size // heads,
        'hidden_act': 'silu',
        # The value is stored as float32; rounding restores the original decimal.
        'rms_norm_eps': float(f'{fields["llama.attention.layer_norm_rms_epsilon"]():.6g}'),
        'vocab_size': len(fields['tokenizer.ggml.tokens']()),
        'max_position_embeddings': fields['llama.context_length'](),
        'rope_theta': rope_theta,
        'rope_parameters': {'rope_type': 'default', 'rope_theta': rope_theta},
        'attention_bias': False,
        'attention_dropout': 0.0,
        'mlp_bias': False,
        'bos_token_id': fields['tokenizer.ggml.bos_token_id'](),
        'eos_token_id': fields['tokenizer.ggml.eos_token_id'](),
        'pad_token_id': fields['tokenizer.ggml.padding_token_id'](),
        'use_cache': True,
        'dtype': 'bfloat16',
    }


def _write_tokenizer(folder: Path, fields: dict[str, Any], config: dict[str, Any]) -> None:
    tokens: list[str] = fields['tokenizer.ggml.tokens']()
    kinds: list[int] = fields['tokenizer.ggml.token_type']()
    merges = [tuple(merge.split(' ')) for merge in fields['tokenizer.ggml.merges']()]
    tokenizer = Tokenizer(BPE({token: index for index, token in enumerate(tokens)}, merges))
    # GGUF files do not contain the pre-tokenizer. Without Digits, spaces before numbers would be split differently.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in special])
    tokenizer.save(str(folder / 'tokenizer.json'))
    chat_template: str = fields['tokenizer.chat_template']()
    (folder / 'chat_template.jinja').write_text(chat_template)
    settings: dict[str, Any] = {
        'tokenizer_class': 'PreTrainedTokenizerFast',
        'bos_token': tokens[config['bos_token_id']],
        'eos_token': tokens[config['eos_token_id']],
        'pad_token': tokens[config['pad_token_id']],
        'unk_token': tokens[fields['tokenizer.ggml.unknown_token_id']()],
        'model_max_length': config['max_position_embeddings'],
        'clean_up_tokenization_spaces': False,
    }
    _write_json(folder / 'tokenizer_config.json', settings)


def _write_json(path: Path, value: Any) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + '\n')
