"""Errors of the batch processor."""

from dataclasses import KW_ONLY

from twinkle.errors import error_class


@error_class()
class InvalidFeatures(ValueError):
    """A batch is invalid; nothing was changed."""

    problem: str
    _: KW_ONLY
    index: int | None = None
    """Position of the feature in the batch; None for the batch as a whole."""
    field: str = ''
    """Field of the feature; empty for the feature as a whole."""

    def __str__(self) -> str:
        location = 'features' if self.index is None else f'features[{self.index}]'
        return f'{location}{"." if self.field else ""}{self.field} {self.problem}'
