"""Packing of a stream in rounds; the emptiest packs of a round wait for later rows."""

from collections.abc import Iterator, Sequence

from twinkle.dataset.bin_packing import pack_best_fit
from twinkle.dataset.packing import join_features, refuse_unpackable
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.streams import ROW_ERRORS, Item, RefusedRow, Stream

_FULL = 0.98
"""Fraction of the capacity from which a pack is returned immediately; emptier packs may wait."""


class WindowPacker:
    """Packs a stream of features.

    After every `interval` new features, all pending features are packed with best-fit decreasing. If they all fit into
    one pack, they stay pending. Otherwise, packs that are at least 98 % full are returned, and so is the pack with the
    oldest feature. Of the other packs, the emptiest stay pending as long as they contain at most `interval` features in
    total. Therefore every feature is returned after a bounded number of rounds, and at most `2 * interval` features are
    pending (more only if all fit into one pack).
    """

    def __init__(self, *, capacity: int, interval: int) -> None:
        """Create a packer without pending features.

        Args:
            capacity: maximum number of tokens in a pack.
            interval: number of new features between two rounds of packing, at least 1.
        """
        self._capacity = capacity
        self._interval = interval
        self._pending: list[Row] = []
        self._new_count = 0

    def add(self, feature: Row) -> list[Row]:
        """Add a feature of at most `capacity` tokens and return the completed packs, usually none."""
        self._pending.append(feature)
        self._new_count += 1
        if self._new_count < self._interval:
            return []
        self._new_count = 0
        bins = self._bins()
        if len(bins) == 1:
            return []
        kept = self._kept(bins)
        done = [self._joined(items) for items in bins if items not in kept]
        self._pending = [self._pending[index] for index in sorted(index for items in kept for index in items)]
        return done

    def finish(self) -> list[Row]:
        """Return the packs of all pending features."""
        done = [self._joined(items) for items in self._bins()]
        self._pending, self._new_count = [], 0
        return done

    def _bins(self) -> list[list[int]]:
        return pack_best_fit([len(feature['input_ids']) for feature in self._pending], capacity=self._capacity)

    def _kept(self, bins: Sequence[list[int]]) -> list[list[int]]:
        loads = {id(items): sum(len(self._pending[index]['input_ids']) for index in items) for items in bins}
        # The first bin contains index 0, the oldest feature.
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
        return join_features([self._pending[index] for index in items])


def packed(stream: Stream, *, capacity: int, interval: int) -> Stream:
    """Return a stream of packs of at most `capacity` tokens; rows that cannot be packed become `RefusedRow`s."""
    return Stream(lambda: _packed(iter(stream), WindowPacker(capacity=capacity, interval=interval), capacity))


def _packed(items: Iterator[Item], packer: WindowPacker, capacity: int) -> Iterator[Item]:
    for index, item in enumerate(items):
        refused = item.passed() if isinstance(item, RefusedRow) else _refused(item, index, capacity)
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
