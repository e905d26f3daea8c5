"""The number of rows of a pass that fits into the memory of a GPU, estimated from the shape of the model.

The estimate depends on the model and on a share of the GPU's total memory, not on the memory that is free now. Every
start of a service therefore gives the same number. A different number would change the order in which gradients are
added.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig

from twinkle.hub import weight_bytes
from twinkle.nn.precision import chosen_dtype, declared_dtype, torch_device

MIN_ROWS, MAX_ROWS = 1024, 16_384
"""Limits of the number of rows. More rows than the maximum do not make products of a pass faster."""
_ROWS_WITHOUT_RECOMPUTING = 8192
"""Rows from which storing all activations saves more time than a larger pass that recomputes them."""
_HEAD_ROWS, _HEAD_COPIES = 1024, 4
"""Rows of a block of the output head on a GPU, and the number of float32 tensors of its logits."""
_RESERVED_BYTES = 2 << 30
"""Memory reserved for adapters, their optimizers and fragmentation, in addition to a tenth of all memory."""
_MARGIN = 1.4
"""Factor for float32 tensors of norms and adapters among tensors in half precision (docs/LOG.md)."""
_SIZES = ('num_hidden_layers', 'hidden_size', 'vocab_size')
_BYTES = {'float32': 4, 'bfloat16': 2, 'float16': 2}


@dataclass(frozen=True)
class PassSize:
    """Size of the passes of a model."""

    row_count: int
    is_checkpointed: bool
    """Whether the backward pass recomputes each layer's activations."""


PASS_ON_A_CPU = PassSize(1024, is_checkpointed=False)
"""Size of the passes on a CPU, where larger passes are not faster."""


def fitting_pass(
    folder: str | os.PathLike[str], *, dtype: str, device: str, memory_share: float, copies: float
) -> PassSize:
    """Return the size of passes for a GPU of this machine.

    Args:
        folder: folder of the model in the Hugging Face layout.
        dtype: data type of the frozen weights, or 'auto'.
        device: torch device of the GPU.
        memory_share: share of the GPU's memory that may be used.
        copies: memory of the weights of this process, relative to that of all weights in `dtype`.

    Raises:
        OSError: the folder has no config.json.
        ValueError: the model is not a decoder, torch finds no GPU, or the model does not fit.
    """
    torch_device(device)
    memory = PassMemory.of(folder, dtype=chosen_dtype(dtype, folder, device=device), copies=copies)
    return memory.pass_size(int(memory_share * torch.cuda.get_device_properties(device).total_memory))


@dataclass(frozen=True, kw_only=True)
class PassMemory:
    """Memory of a model's passes, in bytes."""

    stored: int
    """Activations of all layers, per row."""
    recomputed: int
    """Activations per row if the backward pass recomputes them: the inputs of all layers, and the activations of one
    layer with their gradients."""
    fixed: int
    """Weights, and one block of the output head."""

    @classmethod
    def of(cls, folder: str | os.PathLike[str], *, dtype: str, copies: float = 1.0) -> 'PassMemory':
        """Estimate the memory of a model.

        Args:
            folder: folder of the model in the Hugging Face layout.
            dtype: data type of the loaded weights.
            copies: memory of the weights of this process, relative to that of all weights in `dtype`.

        Raises:
            OSError: the folder has no config.json.
            ValueError: the model is not a decoder.
        """
        config = AutoConfig.from_pretrained(folder).get_text_config()
        layer_count, hidden, vocabulary = (_size(config, name) for name in _SIZES)
        # The tensors are norms, queries, keys, values, the attention's output, residuals, and those of the gated layer.
        layer = round((12 * hidden + 4 * _intermediate(config)) * _BYTES[dtype] * _MARGIN)
        stored_bytes = weight_bytes(Path(folder))
        weights = stored_bytes * _BYTES[dtype] // _BYTES.get(declared_dtype(folder), _BYTES[dtype])
        head = _HEAD_ROWS * vocabulary * _BYTES['float32'] * _HEAD_COPIES
        return cls(
            stored=layer_count * layer,
            # The gradients of one layer's activations exist at the same time as the activations.
            recomputed=layer_count * hidden * _BYTES[dtype] + 2 * layer,
            fixed=int(weights * copies) + head,
        )

    def pass_size(self, memory_bytes: int) -> PassSize:
        """Return the size of passes for a GPU with `memory_bytes`.

        Raises:
            ValueError: a pass of `MIN_ROWS` rows does not fit.
        """
        free = memory_bytes - memory_bytes // 10 - _RESERVED_BYTES - self.fixed
        if self.stored * _ROWS_WITHOUT_RECOMPUTING <= free:
            return PassSize(_power_of_two(free // self.stored), is_checkpointed=False)
        if self.recomputed * MIN_ROWS > free:
            needed = memory_bytes - free + self.recomputed * MIN_ROWS
            raise ValueError(
                f'the model and a pass of {MIN_ROWS} rows need {needed / 2**30:.1f} GiB on the GPU; this process has '
                f"{memory_bytes / 2**30:.1f} GiB; use more GPUs, a larger memory share, quantization or device 'cpu'"
            )
        return PassSize(_power_of_two(free // self.recomputed), is_checkpointed=True)


def _size(config: Any, name: str) -> int:
    if not isinstance(size := getattr(config, name, None), int):
        raise ValueError(f'the configuration of the model has no {name}; set pass_tokens and activation_checkpointing')
    return size


def _intermediate(config: Any) -> int:
    """Return the intermediate size of a layer, or of all experts that a row uses."""
    given = getattr(config, 'intermediate_size', None) or 4 * _size(config, 'hidden_size')
    dense = max(given) if isinstance(given, list | tuple) else int(given)
    expert = int(getattr(config, 'moe_intermediate_size', None) or 0)
    chosen = int(getattr(config, 'num_experts_per_tok', None) or 0)
    shared = int(getattr(config, 'shared_expert_intermediate_size', None) or 0)
    return max(dense, expert * chosen + shared) if expert else dense * max(chosen, 1)


def _power_of_two(limit: int) -> int:
    """Return the largest power of two that is at most `limit`, but from `MIN_ROWS` to `MAX_ROWS`."""
    return min(MAX_ROWS, max(MIN_ROWS, 1 << max(limit, 1).bit_length() - 1))
