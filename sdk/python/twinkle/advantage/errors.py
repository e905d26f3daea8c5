"""What an advantage cannot be estimated from."""


class InvalidAdvantageInput(ValueError):
    """An argument is of no use to the estimator."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f'{field} {problem}')
        self.field = field
        """The argument, and the place in it where there is one."""
        self.problem = problem

    def __reduce__(self) -> tuple[type, tuple[str, str]]:
        return type(self), (self.field, self.problem)
