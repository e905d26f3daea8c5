"""Errors of choosing kernels."""

from twinkle.errors import error_class


@error_class('{operation}: {problem}')
class KernelError(ValueError):
    """A kernel cannot be used for the operation; the model keeps its previous implementation."""

    operation: str
    problem: str
