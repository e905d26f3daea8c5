"""What can be wrong with a choice of kernels."""


class KernelError(ValueError):
    """A kernel cannot be used for this; the model runs what it ran before."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(operation, problem)
        self.operation, self.problem = operation, problem

    def __str__(self) -> str:
        return f'{self.operation}: {self.problem}'
