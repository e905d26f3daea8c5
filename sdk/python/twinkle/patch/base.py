"""The seam between whoever loads a base model and a patch of it."""

from abc import ABC, abstractmethod
from typing import Any


class PatchError(ValueError):
    """A patch cannot be applied to this model, or not now; the model is as it was."""

    def __init__(self, patch: str, problem: str) -> None:
        super().__init__(patch, problem)
        self.patch, self.problem = patch, problem

    def __str__(self) -> str:
        return f'{self.patch}: {self.problem}'


class Patch(ABC):
    """A change to a model that can be undone. One instance is in at most one model at a time.

    Concurrency: apply and undo it while no pass of the model runs.
    """

    def __init__(self) -> None:
        self._model: Any = None

    @property
    def is_applied(self) -> bool:
        """Whether it is in a model."""
        return self._model is not None

    def __call__(self, model: Any) -> Any:
        """Change a model of transformers in place, before anything is built on it; return it.

        Raises:
            PatchError: the model is none this patch is for, or the patch is in one already.
        """
        if self.is_applied:
            raise PatchError(type(self).__name__, 'is applied already; undo it or make another')
        self.apply(model)
        self._model = model
        return model

    def unpatch(self) -> None:
        """Make the model what it was; patches that were applied later have to be undone before.

        Raises:
            PatchError: the patch is in no model.
        """
        if not self.is_applied:
            raise PatchError(type(self).__name__, 'is not applied')
        self.undo(self._model)
        self._model = None

    @abstractmethod
    def apply(self, model: Any) -> None:
        """Make the change, or raise `PatchError` and change nothing."""

    @abstractmethod
    def undo(self, model: Any) -> None:
        """Take the change back, to the bit."""
