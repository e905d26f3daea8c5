"""Changes to a base model, made once when it is loaded and undone when asked.

One frozen base model serves many tenants, so what changes it is the operator's to choose, never a tenant's: a patch
that one of them asked for would be in every other's pass. Adapters are built on the patched model, and a sampler
has to load it with the same patches to agree with the trainer.
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
