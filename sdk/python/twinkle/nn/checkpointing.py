"""Activation checkpointing: keep only each decoder layer's input, and run the layer again in the backward pass.

The layers of transformers carry the switch; what they lack is the adapters, which are gone from
`ActiveAdapters` by then. Dropout follows from the pass's seeds, so the second run draws the same.
"""

from contextlib import AbstractContextManager, nullcontext

from transformers import PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.errors import UnsupportedModel


def checkpoint_layers(model: PreTrainedModel, active: ActiveAdapters) -> None:
    """Checkpoint every decoder layer of a model whenever gradients are recorded.

    Raises:
        UnsupportedModel: the architecture has no layers that can be run again.
    """
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers or not model.supports_gradient_checkpointing:
        raise UnsupportedModel(f'{type(model).__name__} cannot run its layers again')

    def contexts() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
        return nullcontext(), active.again()

    model.gradient_checkpointing_enable(
        {'use_reentrant': False, 'preserve_rng_state': False, 'context_fn': contexts},
    )
    for layer in layers:
        # The switch works in training mode only; that of the layers inside stays off, and with it their own dropout.
        layer.training = True
