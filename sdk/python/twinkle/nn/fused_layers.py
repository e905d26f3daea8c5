"""Replacement of layers by our own: norms and gated layers with one autograd node, and recurrent layers for packs."""

from torch import nn

from twinkle.nn.delta_net import PackedDeltaNet, is_delta_net
from twinkle.nn.gated_mlp import fused_mlp
from twinkle.nn.rms_norm import fused_norm


def fuse_layers(model: nn.Module) -> None:
    """Replace every norm and gated layer that has an equivalent fused form. Weights are shared, not copied."""
    for path, module in list(model.named_modules()):
        fused = fused_norm(module) or fused_mlp(module)
        if fused is not None:
            replace_module(model, path, fused)


def pack_recurrent_layers(model: nn.Module) -> None:
    """Replace every Gated DeltaNet layer by one that keeps the sequences of a pack apart. Weights are shared."""
    for path, module in list(model.named_modules()):
        if is_delta_net(module):
            replace_module(model, path, PackedDeltaNet(module))


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a path of the model."""
    parent, _, name = path.rpartition('.')
    setattr(model.get_submodule(parent), name, module)
