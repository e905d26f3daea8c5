"""Packs made of a stream: some rows at a time, the emptiest packs waiting for what comes next."""

from collections.abc import Iterator, Sequence

from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.files import Row
from twinkle.dataset.packing import join_features, refuse_unpackable
from twinkle.dataset.streams import ROW_ERRORS, Item, RefusedRow, Stream

_FULL = 0.98
"""Share of a pack's room that makes it go out at once; emptier ones may wait."""


class WindowPacker:
    """Packs features as they come.

    When `interval` new ones have come, all that wait are packed best fit. Packs at least 98 % full leave,
    and so does the one with the oldest feature; of the rest, the emptiest wait, while they
    hold at most `interval` features together. So no feature waits without end, and at most
    twice `interval` are held (more only while all of them fit into one pack).
    """

    def __init__(self, *, capacity: int, interval: int) -> None:
        """Begin with nothing waiting.

        Args:
            capacity: most tokens of a pack.
            interval: new features between two rounds of packing, at least 1.
        """
        self._capacity = capacity
        self._interval = interval
        self._waiting: list[Row] = []
        self._new_count = 0

    def add(self, feature: Row) -> list[Row]:
        """Take a feature of at most `capacity` tokens; return the packs that are done, mostly none."""
        self._waiting.append(feature)
        self._new_count += 1
        if self._new_count < self._interval:
            return []
        self._new_count = 0
        bins = self._bins()
        if len(bins) == 1:
            return []
        kept = self._kept(bins)
        done = [self._joined(items) for items in bins if items not in kept]
        self._waiting = [self._waiting[index] for index in sorted(index for items in kept for index in items)]
        return done

    def finish(self) -> list[Row]:
        """Return the packs of all that still waits."""
        done = [self._joined(items) for items in self._bins()]
        self._waiting, self._new_count = [], 0
        return done

    def _bins(self) -> list[list[int]]:
        return pack_best_fit([len(feature['input_ids']) for feature in self._waiting], capacity=self._capacity)

    def _kept(self, bins: Sequence[list[int]]) -> list[list[int]]:
        loads = {id(items): sum(len(self._waiting[index]['input_ids']) for index in items) for items in bins}
        # The first bin holds index 0, the oldest feature.
        candidates = [items for items in bins[1:] if loads[id(items)] < _FULL * self._capacity]
        kept: list[list[int]] = []
        count = 0
        for items in sorted(candidates, key=lambda items: loads[id(items)]):
            count += len(items)
            if count > self._interval:
                break
            kept.append(items)
        return kept

    def _joined(self, items: Sequence[int]) -> Row:
        return join_features([self._waiting[index] for index in items])


def packed(stream: Stream, *, capacity: int, interval: int) -> Stream:
    """Return a stream of packs of at most `capacity` tokens; a row that cannot be packed comes out refused."""
    return Stream(lambda: _packed(iter(stream), WindowPacker(capacity=capacity, interval=interval), capacity))


def _packed(items: Iterator[Item], packer: WindowPacker, capacity: int) -> Iterator[Item]:
    for index, item in enumerate(items):
        refused = item if isinstance(item, RefusedRow) else _refused(item, index, capacity)
        if refused is not None:
            yield refused
        elif not isinstance(item, RefusedRow):
            yield from packer.add(item)
    yield from packer.finish()


def _refused(row: Row, index: int, capacity: int) -> RefusedRow | None:
    try:
        refuse_unpackable(row, index=index, capacity=capacity)
    except ROW_ERRORS as error:
        return RefusedRow(error)
    return None
