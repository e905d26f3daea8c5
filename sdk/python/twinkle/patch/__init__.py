"""Reversible changes to a base model, applied before it has adapters.

One frozen base model serves many tenants, so a patch affects all tenants, and only the operator of a service may
choose it. Adapters are built on the patched model. A sampler must load the model with the same patches as the trainer,
so that both compute the same probabilities.
"""

from twinkle.patch.base import Patch, PatchError, patches_of
from twinkle.patch.registry import PATCHES, apply_context, apply_patch, apply_patches, undo_patches
from twinkle.patch.rope_scaling import RopeScalingPatch

__all__ = [
    'PATCHES',
    'Patch',
    'PatchError',
    'RopeScalingPatch',
    'apply_context',
    'apply_patch',
    'apply_patches',
    'patches_of',
    'undo_patches',
]
