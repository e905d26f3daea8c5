"""Errors of estimating advantages."""

from twinkle.errors import error_class


@error_class('{field} {problem}')
class InvalidAdvantageInput(ValueError):
    """The estimator cannot use an argument."""

    field: str
    """Argument, with the position in it where there is one."""
    problem: str
