"""Which parts of which items run together, as a pure queue.

A part is a run of one item's features that was cut off by the item alone. What is decided here
changes how fast a batch runs and nothing else: an item's bits do not depend on its neighbours.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Slot(NamedTuple):
    """One part of one item."""

    item: int
    part: int


class PassPlanner:
    """Hands out passes of at most `max_tokens` rows, with at most one part of an item in each.

    Parts of an item come in order. Items that are least far go first, so that every item's first
    part has run before any item's second, as far as sizes allow. A part larger than a pass has one
    for itself.

    Args:
        max_tokens: rows of a pass, at least 1.
    """

    def __init__(self, *, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._waiting: dict[int, list[int]] = {}
        """Item to the sizes of all its parts."""
        self._next_part: dict[int, int] = {}

    def add(self, item: int, part_tokens: Sequence[int]) -> None:
        """Queue an item, whose number is new, with the size of each of its parts, at least one."""
        self._waiting[item] = list(part_tokens)
        self._next_part[item] = 0

    def drop(self, item: int) -> None:
        """Forget what is left of an item; nothing happens where nothing is."""
        self._waiting.pop(item, None)

    def next_pass(self) -> list[Slot]:
        """Take the next pass off the queue; empty when nothing is left."""
        slots: list[Slot] = []
        room = self._max_tokens
        for part, item in sorted((self._next_part[item], item) for item in self._waiting):
            tokens = self._waiting[item][part]
            if not slots or tokens <= room:
                slots.append(Slot(item, part))
                room -= tokens
        for slot in slots:
            self._advance(slot)
        return sorted(slots)

    def _advance(self, slot: Slot) -> None:
        self._next_part[slot.item] = slot.part + 1
        if slot.part + 1 == len(self._waiting[slot.item]):
            del self._waiting[slot.item]
