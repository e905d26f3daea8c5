"""Patches by name, and how they get into a model."""

from collections.abc import Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

from twinkle.component import ComponentRegistry
from twinkle.patch.base import Patch, patches_of
from twinkle.patch.rope_scaling import RopeScalingPatch

PATCHES = ComponentRegistry('patch', Patch, (RopeScalingPatch,))
"""Patches by name."""


def apply_patch(model: Any, patch: 'str | type[Patch] | Patch', /, **options: Any) -> Patch:
    """Apply a patch given by name, class or instance; return it, to be undone with `unpatch`.

    Raises:
        UnknownComponent: the name is not registered.
        InvalidComponentOptions: an option is unknown or out of range.
        PatchError: the model is none this patch is for; nothing was changed.
    """
    built = PATCHES.build(patch, options)
    built(model)
    return built


def apply_patches(model: Any, patches: Sequence[tuple[str, Mapping[str, Any]]]) -> list[Patch]:
    """Apply an operator's patches, each a name and options, in order; all of them or none.

    Raises:
        UnknownComponent, InvalidComponentOptions, PatchError: as `apply_patch`.
        Whatever a patch of your own raises; in each case the model is as it was.
    """
    built = [PATCHES.build(name, options) for name, options in patches]
    with ExitStack() as undo:
        for patch in built:
            patch(model)
            undo.callback(patch.unpatch)
        undo.pop_all()
    return built


def undo_patches(patches: Sequence[Patch]) -> None:
    """Undo patches that `apply_patches` returned, the last one first."""
    for patch in reversed(patches):
        patch.unpatch()


@contextmanager
def apply_context(model: Any, patch: 'str | type[Patch] | Patch', /, **options: Any) -> Generator[Patch]:
    """Have a patch in a model until the block ends, however it ends; raises as `apply_patch`.

    Patches that the block applied after it and left there are undone with it, the last one first.
    """
    before = len(patches_of(model))
    applied = apply_patch(model, patch, **options)
    try:
        yield applied
    finally:
        undo_patches(patches_of(model)[before:])
