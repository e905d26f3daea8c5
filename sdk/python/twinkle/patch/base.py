"""Base class of patches, and the record of the patches of a model."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from twinkle.errors import error_class
from twinkle.patch.versions import VersionRange, version_problem


@error_class('{patch}: {problem}')
class PatchError(ValueError):
    """A patch cannot be applied or removed; the model is unchanged."""

    patch: str
    problem: str


_ATTRIBUTE = '_twinkle_patches'
"""Attribute of a model that lists its patches in the order of application."""


def patches_of(model: Any) -> 'tuple[Patch, ...]':
    """Return the patches of a model, in the order of application."""
    return tuple(vars(model).get(_ATTRIBUTE, ()))


class Patch(ABC):
    """Reversible change to a model. One instance can be applied to at most one model at a time.

    Concurrency: apply and undo a patch only while no pass of the model is running.
    """

    libraries: ClassVar[Mapping[str, VersionRange]] = {}
    """Supported versions of each library whose internals the patch changes; other versions are refused."""

    def __init__(self) -> None:
        self._model: Any = None

    @property
    def is_applied(self) -> bool:
        """Whether the patch is applied to a model."""
        return self._model is not None

    def __call__(self, model: Any) -> Any:
        """Apply the patch in place to a transformers model, before anything is built on it; return the model.

        Idempotency: applying the patch to the same model again has no effect.

        Raises:
            PatchError: the patch does not support the model, is applied to a different model, or does not support the
                installed version of a library.
        """
        if self._model is model:
            return model
        if self.is_applied:
            raise PatchError(type(self).__name__, 'is applied to another model; undo it or create another instance')
        problem = version_problem(self.libraries)
        if problem is not None:
            raise PatchError(type(self).__name__, problem)
        self.apply(model)
        self._model = model
        vars(model).setdefault(_ATTRIBUTE, []).append(self)
        return model

    def unpatch(self) -> None:
        """Restore the model. Patches that were applied later must be undone first.

        Raises:
            PatchError: the patch is not applied, or a later patch is still applied; nothing was changed.
        """
        if not self.is_applied:
            raise PatchError(type(self).__name__, 'is not applied')
        later = patches_of(self._model)[-1]
        if later is not self:
            raise PatchError(type(self).__name__, f'{type(later).__name__} was applied after it; undo that first')
        self.undo(self._model)
        vars(self._model)[_ATTRIBUTE].pop()
        self._model = None

    @abstractmethod
    def apply(self, model: Any) -> None:
        """Change the model, or raise `PatchError` and change nothing."""

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Restore the model bitwise."""
