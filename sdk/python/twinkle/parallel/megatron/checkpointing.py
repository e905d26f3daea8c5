"""Activation checkpointing of Megatron-core's layers.

Megatron-core's own checkpointing supports only `backward`, and gradients of several adapters need `autograd.grad`.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from megatron.core.transformer.transformer_block import TransformerBlock
from torch import nn
from torch.utils import checkpoint as torch_checkpoint

from twinkle.nn.active_adapters import ActiveAdapters


def checkpoint_block(block: TransformerBlock, active: ActiveAdapters) -> None:
    """Recompute each layer's activations in the backward pass instead of storing them."""
    block.layers = nn.ModuleList(_CheckpointedLayer(layer, active) for layer in block.layers)


class _CheckpointedLayer(nn.Module):
    def __init__(self, layer: nn.Module, active: ActiveAdapters) -> None:
        super().__init__()
        self._layer = layer
        self._active = active

    def forward(self, **arguments: Any) -> Any:
        if not torch.is_grad_enabled():
            return self._layer(**arguments)
        return cast('Any', torch_checkpoint).checkpoint(
            self._layer,
            use_reentrant=False,
            preserve_rng_state=False,
            context_fn=self._contexts,
            **arguments,
        )

    def _contexts(self) -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), self._active.reactivate()
