"""Queue that groups parts of different items into passes.

An item is the batch of one adapter. It is divided into parts independently of other items. The plan only affects
speed: results of an item are bitwise independent of the other items in its passes.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One part of one item."""

    item: int
    part: int


class PassPlanner:
    """Plans passes of at most `max_rows` rows, with at most one part per item.

    Parts of an item run in order. Items with the fewest completed parts are first, so every item's first part runs
    before any second part if sizes permit. A part larger than `max_rows` runs alone.

    Args:
        max_rows: maximum number of rows of a pass, at least 1.
    """

    def __init__(self, *, max_rows: int) -> None:
        self._max_rows = max_rows
        self._queue: dict[int, Sequence[int]] = {}
        """Number of rows that each part needs in a pass, by item."""
        self._next_part: dict[int, int] = {}

    def add(self, item: int, part_rows: Sequence[int], *, next_part: int = 0) -> None:
        """Add a new item with the number of rows that each part needs. The first `next_part` parts have run."""
        self._queue[item] = part_rows
        self._next_part[item] = next_part

    def next_pass(self) -> list[Slot]:
        """Remove the next pass from the queue and return its slots; an empty list if the queue is empty."""
        slots: list[Slot] = []
        free_rows = self._max_rows
        for part, item in sorted((self._next_part[item], item) for item in self._queue):
            rows = self._queue[item][part]
            if not slots or rows <= free_rows:
                slots.append(Slot(item, part))
                free_rows -= rows
        for slot in slots:
            self._advance(slot)
        return sorted(slots)

    def _advance(self, slot: Slot) -> None:
        self._next_part[slot.item] = slot.part + 1
        if slot.part + 1 == len(self._queue[slot.item]):
            del self._queue[slot.item]
