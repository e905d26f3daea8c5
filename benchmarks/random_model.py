"""Random models with the sizes of Qwen3, for machines without downloaded weights."""

from typing import Any

import torch
from transformers import AutoModelForCausalLM, Qwen3Config

SIZES: dict[str, dict[str, Any]] = {
    '2b': {'hidden_size': 2048, 'intermediate_size': 6144, 'num_hidden_layers': 28, 'num_attention_heads': 16},
    '4b': {'hidden_size': 2560, 'intermediate_size': 9728, 'num_hidden_layers': 36, 'num_attention_heads': 32},
    '8b': {'hidden_size': 4096, 'intermediate_size': 12288, 'num_hidden_layers': 36, 'num_attention_heads': 32},
}
"""Shapes of the Qwen3 models by their approximate number of parameters."""
_SHARED = {'num_key_value_heads': 8, 'head_dim': 128, 'vocab_size': 151936, 'max_position_embeddings': 4096}
"""Configuration of the models of all sizes."""


def build_random_model(size: str, *, device: str, dtype: str, attention: str) -> Any:
    """Return a transformers model with random weights, created on its device.

    Args:
        size: A key of `SIZES`.
        device: Device of the model, such as 'cuda:0'.
        dtype: Name of a torch dtype.
        attention: Name of the attention implementation in transformers.
    """
    config = Qwen3Config(**SIZES[size], **_SHARED, tie_word_embeddings=size != '8b')
    torch.manual_seed(0)
    with torch.device(device):
        return AutoModelForCausalLM.from_config(config, dtype=getattr(torch, dtype), attn_implementation=attention)
