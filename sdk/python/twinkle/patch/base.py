"""The seam between whoever loads a base model and a patch of it."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

from twinkle.errors import error_class
from twinkle.patch.versions import VersionRange, misfit


@error_class('{patch}: {problem}')
class PatchError(ValueError):
    """A patch cannot be applied to this model at this time; the model is unchanged."""

    patch: str
    problem: str


_KEPT_AS = '_twinkle_patches'
"""Attribute of a model under which it keeps its patches, in the order in which they came."""


def patches_of(model: Any) -> 'tuple[Patch, ...]':
    """Return the patches that are in a model, the last one last."""
    return tuple(vars(model).get(_KEPT_AS, ()))


class Patch(ABC):
    """A change to a model that can be undone. One instance is in at most one model at a time.

    Concurrency: apply and undo it while no pass of the model runs.
    """

    libraries: ClassVar[Mapping[str, VersionRange]] = {}
    """Versions it was written for, by the library whose inside it changes; it refuses all others."""

    def __init__(self) -> None:
        self._model: Any = None

    @property
    def is_applied(self) -> bool:
        """Whether it is in a model."""
        return self._model is not None

    def __call__(self, model: Any) -> Any:
        """Change a model of transformers in place, before anything is built on it; return it.

        Idempotency: where it is in this very model already, nothing happens.

        Raises:
            PatchError: the model is none this patch is for, the patch is in another one, or it is for other
                versions of a library than are installed.
        """
        if self._model is model:
            return model
        if self.is_applied:
            raise PatchError(type(self).__name__, 'is in another model; undo it or make another patch')
        problem = misfit(self.libraries)
        if problem is not None:
            raise PatchError(type(self).__name__, problem)
        self.apply(model)
        self._model = model
        vars(model).setdefault(_KEPT_AS, []).append(self)
        return model

    def unpatch(self) -> None:
        """Make the model what it was; patches that were applied later have to be undone before.

        Raises:
            PatchError: the patch is in no model, or another one came after it; nothing was changed.
        """
        if not self.is_applied:
            raise PatchError(type(self).__name__, 'is not applied')
        later = patches_of(self._model)[-1]
        if later is not self:
            raise PatchError(type(self).__name__, f'{type(later).__name__} was applied after it; undo that first')
        self.undo(self._model)
        vars(self._model)[_KEPT_AS].pop()
        self._model = None

    @abstractmethod
    def apply(self, model: Any) -> None:
        """Make the change, or raise `PatchError` and change nothing."""

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Take the change back, to the bit."""
