"""Random models of the sizes of Qwen3, for machines that can hold them and have no weights at hand."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES: dict[str, dict[str, Any]] = {
    '2b': {'hidden_size': 2048, 'intermediate_size': 6144, 'num_hidden_layers': 28, 'num_attention_heads': 16},
    '4b': {'hidden_size': 2560, 'intermediate_size': 9728, 'num_hidden_layers': 36, 'num_attention_heads': 32},
    '8b': {'hidden_size': 4096, 'intermediate_size': 12288, 'num_hidden_layers': 36, 'num_attention_heads': 32},
}
"""By name: the shapes of Qwen3 of about so many parameters."""
_SHARED = {'num_key_value_heads': 8, 'head_dim': 128, 'vocab_size': 151936, 'max_position_embeddings': 4096}


def build_random_model(size: str, *, device: str, dtype: str, attention: str) -> Any:
    """Return a transformers model of that size with random weights, made where it is to run.

    Args:
        size: one of `SIZES`.
        device: such as 'cuda:0'.
        dtype: by torch's name.
        attention: transformers' name of the implementation.
    """
    config = Qwen3Config(**SIZES[size], **_SHARED, tie_word_embeddings=size != '8b')
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
