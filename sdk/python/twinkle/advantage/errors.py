"""Errors of advantage estimation."""


class InvalidAdvantageInput(ValueError):
    """An argument of an estimator is invalid."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field} {problem}')
        self.field = field
        """Name of the argument, with an index where the problem is in one element."""
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)
