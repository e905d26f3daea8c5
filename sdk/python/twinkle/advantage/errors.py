"""Errors of estimating advantages."""

from twinkle.errors import error_class


@error_class('{field} {problem}')
class InvalidAdvantageInput(ValueError):
    """The estimator cannot use an argument."""

    field: str
    """Name of the argument, with an index if a single element is invalid, such as `rewards[3]`."""
    problem: str
