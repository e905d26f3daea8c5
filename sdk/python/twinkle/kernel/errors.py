"""Errors of kernel selection."""


class KernelError(ValueError):
    """A kernel cannot be used for an operation; the model's kernels are unchanged."""

    def __init__(self, operation: str, problem: str) -> None:
        super().__init__(operation, problem)
        self.operation, self.problem = operation, problem

    def __str__(self) -> str:
        return f'{self.operation}: {self.problem}'
