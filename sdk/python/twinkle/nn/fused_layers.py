"""Replacement of layers in a loaded model.

Norms and gated layers are replaced by fused layers, each a single autograd node. Gated DeltaNet layers and experts are
replaced by layers whose results do not depend on the rest of a pack.
"""

from torch import nn

from twinkle.nn.active_adapters import ActiveAdapters
from twinkle.nn.delta_net import PackedDeltaNet, is_delta_net
from twinkle.nn.experts import PackedExperts, is_experts
from twinkle.nn.gated_mlp import fused_mlp
from twinkle.nn.kernel_layer import KernelLayer
from twinkle.nn.rms_norm import fused_norm


def fuse_layers(model: nn.Module) -> None:
    """Replace norms and gated layers below a module by equivalent fused layers, where these exist.

    Weights are shared, not copied. Layers whose weights are divided among ranks are left unchanged.
    """
    for name, child in list(model.named_children()):
        if isinstance(child, KernelLayer):
            continue
        fused = fused_norm(child) or fused_mlp(child)
        if fused is None:
            fuse_layers(child)
        else:
            setattr(model, name, fused)


def pack_layers(model: nn.Module, active: ActiveAdapters, *, within: nn.Module) -> dict[str, tuple[int, int, int]]:
    """Replace Gated DeltaNet layers and experts below `within` by layers that keep the sequences of a pack separate.

    Returns:
        `(experts, in_features, out_features)` of the stacked weights that accept adapters, by module path.
    """
    own = set(within.modules())
    shapes: dict[str, tuple[int, int, int]] = {}
    for path, module in list(model.named_modules()):
        if module not in own:
            continue
        if is_delta_net(module):
            replace_module(model, path, PackedDeltaNet(module))
        elif is_experts(module):
            experts = PackedExperts(module, path=path, active=active)
            replace_module(model, path, experts)
            shapes |= experts.target_shapes
    return shapes


def replace_module(model: nn.Module, path: str, module: nn.Module) -> None:
    """Replace the module at a path of the model."""
    parent, _, name = path.rpartition('.')
    setattr(model.get_submodule(parent), name, module)
