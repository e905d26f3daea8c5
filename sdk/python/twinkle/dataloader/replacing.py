"""What happens to rows that cannot be read: others take their place, up to a bound, and it is told."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from twinkle.dataset import RefusedRow
from twinkle.errors import error_class
from twinkle.infra import get_logger


@dataclass(frozen=True, kw_only=True)
class Replacement:
    """A row that another one stood in for."""

    epoch: int
    """Zero-based."""
    position: int
    """Place in the epoch's order; in a stream, before it is shuffled."""
    index: int | None
    """The row that could not be read. None: it is of a stream."""
    replacement: int | None
    """The row in its place. None: the next one of the stream."""
    reason: str
    """What reading it raised."""


@error_class(
    '{count} rows in a row could not be read for {place}; the last one: {reason}. '
    'Leave such rows out with filter() or check(), or raise max_retries'
)
class BadSamples(RuntimeError):
    """Too many consecutive rows cannot be read, so the data or the program is wrong."""

    count: int
    """Number of rows that were tried."""
    place: str
    reason: str


class ReplacementLog:
    """Collects replacements and logs each."""

    def __init__(self, max_retries: int) -> None:
        self.max_retries = max_retries
        """Most rows tried in the place of one."""
        self.entries: list[Replacement] = []
        """What was replaced, in the order of reading."""

    def add(self, entry: Replacement) -> None:
        """Note a replacement."""
        self.entries.append(entry)
        bad = 'a row of the stream' if entry.index is None else f'row {entry.index}'
        good = 'the next one' if entry.replacement is None else f'row {entry.replacement}'
        get_logger().warning(
            '%s took the place of %s (epoch %d, place %d): %s', good, bad, entry.epoch, entry.position, entry.reason
        )

    def without_refused(self, items: Iterable[Any], *, epoch: int) -> Iterator[Any]:
        """Yield the rows of a stream, leaving out and noting those that were refused.

        Raises:
            BadSamples: more than `max_retries` follow each other.
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
                raise BadSamples(refused_count, f'place {position} of the stream', reason) from item.error
            self.add(Replacement(epoch=epoch, position=position, index=None, replacement=None, reason=reason))
