"""Replacement of rows that cannot be read; replacements are limited and logged."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from twinkle.dataset import RefusedRow
from twinkle.errors import error_class
from twinkle.infra import get_logger


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """The replacement of one row that could not be read."""

    epoch: int
    """Zero-based epoch."""
    position: int
    """Zero-based position in the epoch's order; for a stream, the position before shuffling."""
    index: int | None
    """Index of the row that could not be read; None for a stream."""
    replacement: int | None
    """Index of the row used instead; None for a stream, which continues with its next row."""
    reason: str
    """Type and message of the exception."""


@error_class(
    '{count} consecutive rows could not be read for {place}; last reason: {reason}. '
    'Remove such rows with filter() or check(), or increase max_retries'
)
class BadSamples(RuntimeError):
    """Too many consecutive rows cannot be read, so the data or the program is wrong."""

    count: int
    """Number of rows that were tried."""
    place: str
    """Position of the row, as text."""
    reason: str
    """Type and message of the last exception."""


class ReplacementLog:
    """Logs and collects replacements."""

    def __init__(self, max_retries: int) -> None:
        self.max_retries = max_retries
        """Maximum number of rows tried instead of one row."""
        self.entries: list[Replacement] = []
        """All replacements, in the order of reading."""

    def add(self, entry: Replacement) -> None:
        """Log and store a replacement."""
        self.entries.append(entry)
        row = 'row of the stream' if entry.index is None else f'row {entry.index}'
        replacement = 'the next row' if entry.replacement is None else f'row {entry.replacement}'
        get_logger().warning(
            '%s cannot be read and is replaced by %s (epoch %d, position %d): %s',
            row, replacement, entry.epoch, entry.position, entry.reason,
        )  # fmt: skip

    def without_refused(self, items: Iterable[Any], *, epoch: int) -> Iterator[Any]:
        """Yield the readable rows of a stream, and record each `RefusedRow` as a replacement.

        Raises:
            BadSamples: more than `max_retries` consecutive rows are refused.
        """
        refused_count = 0
        for position, item in enumerate(items):
            if not isinstance(item, RefusedRow):
                refused_count = 0
                yield item
                continue
            refused_count += 1
            reason = f'{type(item.error).__name__}: {item.error}'
            if refused_count > self.max_retries:
                raise BadSamples(refused_count, f'position {position} of the stream', reason) from item.error
            self.add(Replacement(epoch=epoch, position=position, index=None, replacement=None, reason=reason))
