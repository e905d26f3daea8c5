"""Registry of patches, and functions that apply and undo them."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from twinkle.component import ComponentRegistry
from twinkle.patch.base import Patch, patches_of
from twinkle.patch.rope_scaling import RopeScalingPatch

PATCHES = ComponentRegistry('patch', Patch, (RopeScalingPatch,))
"""Registered patches by name."""


def apply_patch(model: Any, patch: 'str | type[Patch] | Patch', /, **options: Any) -> Patch:
    """Apply a patch given by name, plugin id, class or instance; return the patch object for a later `unpatch`.

    Raises:
        UnknownComponent, InvalidComponentOptions, PluginRefused, HubError: see `ComponentRegistry.build`.
        PatchError: the patch cannot be applied, see `Patch.__call__`; nothing was changed.
    """
    built = PATCHES.build(patch, options)
    built(model)
    return built


def apply_patches(model: Any, patches: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Patch]:
    """Apply patches given as names and options, in order; if a patch fails, the previous patches are undone.

    Raises:
        UnknownComponent, InvalidComponentOptions, PluginRefused, HubError, PatchError: see `apply_patch`.
        Exception: a custom patch raised it.
    """
    built = [PATCHES.build(name, options) for name, options in patches]
    with ExitStack() as undo:
        for patch in built:
            patch(model)
            undo.callback(patch.unpatch)
        undo.pop_all()
    return built


def undo_patches(patches: Sequence[Patch]) -> None:
    """Undo the patches returned by `apply_patches`, in reverse order."""
    for patch in reversed(patches):
        patch.unpatch()


@contextmanager
def apply_context(model: Any, patch: 'str | type[Patch] | Patch', /, **options: Any) -> Generator[Patch]:
    """Apply a patch for the duration of the block; for errors see `apply_patch`.

    Patches that the block applied to the model and did not undo are also undone, in reverse order.
    """
    before = len(patches_of(model))
    applied = apply_patch(model, patch, **options)
    try:
        yield applied
    finally:
        undo_patches(patches_of(model)[before:])
