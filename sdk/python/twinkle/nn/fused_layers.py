"""Replacement of layers in a loaded model.

Norms and gated layers are replaced by fused ones, each a single autograd node. Gated DeltaNet layers and experts are
replaced by layers whose results do not depend on the rest of a pack.
"""

from torch import nn

from twinkle.nn.delta_net import PackedDeltaNet, is_delta_net
from twinkle.nn.experts import PackedExperts, is_experts
from twinkle.nn.gated_mlp import fused_mlp
from twinkle.nn.rms_norm import fused_norm


def fuse_layers(model: nn.Module) -> None:
    """Replace every norm and gated layer that has an equivalent fused form. Weights are shared, not copied."""
    for path, module in list(model.named_modules()):
        fused = fused_norm(module) or fused_mlp(module)
        if fused is not None:
            replace_module(model, path, fused)


def pack_layers(model: nn.Module) -> None:
    """Replace Gated DeltaNet layers and experts by layers whose results do not depend on the rest of a pack."""
    for path, module in list(model.named_modules()):
        if is_delta_net(module):
            replace_module(model, path, PackedDeltaNet(module))
        elif is_experts(module):
            replace_module(model, path, PackedExperts(module))


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a path of the model."""
    parent, _, name = path.rpartition('.')
    setattr(model.get_submodule(parent), name, module)
