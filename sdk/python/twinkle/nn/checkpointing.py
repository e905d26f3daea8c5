"""Activation checkpointing: store only each decoder layer's input, and recompute the layer in the backward pass.

The layers of transformers do this. When the backward pass runs, the forward pass has ended and `ActiveAdapters` is
empty, so the context function here restores the adapters of the pass. Dropout masks depend only on the pass's seeds, so
the recomputation uses the same masks.
"""

from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.errors import UnsupportedModel


def checkpoint_layers(model: PreTrainedModel, active: ActiveAdapters) -> None:
    """Checkpoint every decoder layer of a model whenever gradients are recorded.

    Raises:
        UnsupportedModel: the architecture has no layers that support recomputation.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UnsupportedModel(f'{type(model).__name__} does not support gradient checkpointing')

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), active.reactivate()

    model.gradient_checkpointing_enable(
        {'use_reentrant': False, 'preserve_rng_state': False, 'context_fn': contexts},
    )
    for layer in layers:
        # Checkpointing requires training mode. Modules inside the layer stay in eval mode, so their dropout is off.
        layer.training = True
