"""Errors of computing losses."""

from dataclasses import KW_ONLY, field

from twinkle.errors import error_class


@error_class()
class InvalidLossInput(ValueError):
    """A batch does not fit the loss; nothing was changed."""

    problem: str
    _: KW_ONLY
    index: int | None = None
    """Position of the feature in the batch; None for the batch as a whole."""

    def __str__(self) -> str:
        return self.problem if self.index is None else f'features[{self.index}] {self.problem}'


@error_class()
class MissingStream(InvalidLossInput):
    """A loss needs a per-token stream that the features do not have."""

    problem: str = field(init=False, repr=False)
    loss: str
    name: str

    def __post_init__(self) -> None:
        self.problem = f'{self.loss} needs {self.name} on every feature'


@error_class()
class MissingOutput(InvalidLossInput):
    """A loss needs an output that the forward pass did not compute."""

    problem: str = field(init=False, repr=False)
    name: str

    def __post_init__(self) -> None:
        self.problem = f'the loss needs {self.name}, which this forward pass does not compute'
