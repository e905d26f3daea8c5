"""What a loss cannot be computed from."""


class InvalidLossInput(ValueError):
    """A batch does not fit the loss; nothing was changed."""

    def __init__(self, problem: str, *, index: int | None = None) -> None:
        super().__init__(problem if index is None else f'features[{index}] {problem}')
        self.problem = problem
        self.index = index
        """Which feature; None for the batch as a whole."""


class MissingStream(InvalidLossInput):
    """A loss needs a per-token stream that the features do not carry."""

    def __init__(self, loss: str, name: str) -> None:
        super().__init__(f'{loss} needs {name} on every feature')
        self.loss, self.name = loss, name


class MissingOutput(InvalidLossInput):
    """A loss needs something of the forward pass that it was not given."""

    def __init__(self, name: str) -> None:
        super().__init__(f'the loss needs {name}, which this forward pass does not give')
        self.name = name
