"""Adapters with random weights on all linear layers of a model with the Llama architecture."""

import json
from pathlib import Path

import numpy as np

from twinkle.data_format import TensorData


def random_adapter(folder: Path, lora_rank: int, *, seed: int) -> dict[str, TensorData]:
    """Return the float32 tensors by their names in peft, with values so small that outputs change little.

    Args:
        folder: Folder of the base model; its configuration defines the shapes.
        lora_rank: Rank of the adapter.
        seed: Seed of the values.
    """
    shapes = _shapes(json.loads((folder / 'config.json').read_text(encoding='utf-8')))
    random = np.random.default_rng(seed)
    tensors: dict[str, TensorData] = {}
    for name, (inputs, outputs) in shapes.items():
        for part, shape in (('lora_A', (lora_rank, inputs)), ('lora_B', (outputs, lora_rank))):
            array = random.standard_normal(shape, dtype=np.float32) * np.float32(0.01)
            tensors[f'base_model.model.{name}.{part}.weight'] = TensorData.from_numpy(array)
    return tensors


def _shapes(config: dict[str, int]) -> dict[str, tuple[int, int]]:
    """Return the input and output size of each layer by its name in the model."""
    hidden, intermediate = config['hidden_size'], config['intermediate_size']
    head = config.get('head_dim') or hidden // config['num_attention_heads']
    query, key_value = head * config['num_attention_heads'], head * config['num_key_value_heads']
    layer_shapes = {
        'self_attn.q_proj': (hidden, query),
        'self_attn.k_proj': (hidden, key_value),
        'self_attn.v_proj': (hidden, key_value),
        'self_attn.o_proj': (query, hidden),
        'mlp.gate_proj': (hidden, intermediate),
        'mlp.up_proj': (hidden, intermediate),
        'mlp.down_proj': (intermediate, hidden),
    }
    layers = range(config['num_hidden_layers'])
    return {f'model.layers.{layer}.{name}': shape for layer in layers for name, shape in layer_shapes.items()}
