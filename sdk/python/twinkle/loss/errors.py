"""Errors of loss computation."""

from functools import partial


class InvalidLossInput(ValueError):
    """A batch is invalid for the loss; nothing was changed."""

    def __init__(self, problem: str, *, index: int | None = None) -> None:
        super().__init__(problem if index is None else f'features[{index}] {problem}')
        self.problem = problem
        self.index = index
        """Index of the feature; None for the batch as a whole."""

    def __reduce__(self) -> tuple[partial['InvalidLossInput'], tuple[str]]:
        return partial(type(self), index=self.index), (self.problem,)


class MissingStream(InvalidLossInput):
    """A loss needs a per-token stream that the features do not have."""

    def __init__(self, loss: str, name: str) -> None:
        super().__init__(f'{loss} needs {name} on every feature')
        self.loss, self.name = loss, name

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.loss, self.name)


class MissingOutput(InvalidLossInput):
    """A loss needs an output that the forward pass did not compute."""

    def __init__(self, name: str) -> None:
        super().__init__(f'the loss needs {name}, which this forward pass does not compute')
        self.name = name

    def __reduce__(self) -> tuple[type, tuple[str]]:
        return type(self), (self.name,)
