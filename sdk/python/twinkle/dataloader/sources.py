"""Batches of one epoch: of rows that have indices, and of streams."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from twinkle.dataloader.order import count_batches, epoch_order, replacement_index, shuffled_stream
from twinkle.dataloader.ranks import RankSlice
from twinkle.dataloader.replacing import BadSamples, Replacement, ReplacementLog
from twinkle.dataset import ROW_ERRORS, IterableDataset

_REPLACEMENT_SEED = 42
"""Of the replacements, where rows are not shuffled."""


class Rows(Protocol):
    """What can be read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """How batches are cut."""

    batch_size: int
    """Examples of a batch over all ranks."""
    min_batch_size: int
    """A last batch of fewer is left out."""
    part: RankSlice
    """What of each batch this process reads."""
    seed: int | None
    """Of the random orders. None: not shuffled."""
    shuffle_buffer: int
    """Rows of a stream that are held to shuffle it."""


@dataclass(frozen=True)
class Position:
    """A place between two batches."""

    consumed: int = 0
    """Examples before it, over all epochs and ranks."""
    epoch: int = 0
    """Zero-based."""
    within: int = 0
    """Examples of this epoch before it."""


class BatchSource(Protocol):
    """Batches from a position on."""

    @property
    def size(self) -> int | None:
        """Number of rows, None if unknown."""
        ...

    @property
    def epoch_size(self) -> int | None:
        """Number of examples that an epoch gives out, None if unknown."""
        ...

    def located(self, consumed: int) -> Position:
        """Return the position behind this many examples, counted over all epochs.

        Raises:
            ValueError: no batch begins there.
        """
        ...

    def next_epoch(self, position: Position) -> Position:
        """Return where the epoch behind that of `position` begins."""
        ...

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each batch up to the epoch's end, with the position behind it.

        Raises:
            BadSamples: too many rows cannot be read.
        """
        ...


class IndexedBatches:
    """Batches of rows that have indices."""

    def __init__(self, rows: Rows, layout: Layout, log: ReplacementLog) -> None:
        self._rows = rows
        self._layout = layout
        self._log = log

    @property
    def size(self) -> int:
        """Number of rows."""
        return len(self._rows)

    @property
    def batch_count(self) -> int:
        """Batches of one epoch."""
        layout = self._layout
        return count_batches(self.size, batch_size=layout.batch_size, min_batch_size=layout.min_batch_size)

    @property
    def epoch_size(self) -> int:
        """Examples that an epoch gives out, those of a last batch that is left out not counted."""
        return min(self.batch_count * self._layout.batch_size, self.size)

    def located(self, consumed: int) -> Position:
        """Return the position behind this many examples; see `BatchSource`."""
        size = self.epoch_size
        epoch, within = divmod(consumed, size) if size else (0, 0)
        if within % self._layout.batch_size:
            raise ValueError(
                f'no batch begins at consumed_train_samples {consumed}: '
                f'batches of {self._layout.batch_size} begin anew with each epoch of {size} examples'
            )
        return Position(consumed, epoch, within)

    def next_epoch(self, position: Position) -> Position:
        """Return where the next epoch begins; what is left of this one counts as consumed."""
        return Position((position.epoch + 1) * self.epoch_size, position.epoch + 1)

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each batch; see `BatchSource`."""
        epoch, size = position.epoch, self.epoch_size
        order = epoch_order(self.size, seed=self._layout.seed, epoch=epoch)
        for offset in range(position.within, size, self._layout.batch_size):
            count = min(self._layout.batch_size, size - offset)
            places = [offset + place for place in self._layout.part.of(count)]
            batch = [self._read(int(order[place]), (epoch, place)) for place in places]
            yield batch, Position(epoch * size + offset + count, epoch, offset + count)

    def _read(self, index: int, place: tuple[int, int]) -> Any:
        """Return row `index`, or the one in its place."""
        errors: list[Exception] = []
        for attempt in range(self._log.max_retries + 1):
            chosen = self._chosen(place, attempt) if attempt else index
            try:
                row = self._rows[chosen]
            except ROW_ERRORS as error:
                errors.append(error)
                continue
            if errors:
                self._log.add(_replacement(place, index, chosen, errors[0]))
            return row
        raise BadSamples(len(errors), f'place {place[1]} of epoch {place[0]}', _told(errors[-1])) from errors[-1]

    def _chosen(self, place: tuple[int, int], attempt: int) -> int:
        seed = self._layout.seed if self._layout.seed is not None else _REPLACEMENT_SEED
        return replacement_index(self.size, seed=seed, place=place, attempt=attempt)


class StreamedBatches:
    """Batches of a stream. A position is found again by reading up to it, so it is exact whatever the rows go through.

    Every rank reads the whole stream and keeps its part.
    """

    def __init__(self, rows: Iterable[Any], layout: Layout, log: ReplacementLog) -> None:
        self._rows = rows
        self._layout = layout
        self._log = log

    @property
    def size(self) -> None:
        """Unknown."""
        return

    @property
    def epoch_size(self) -> None:
        """Unknown."""
        return

    def located(self, consumed: int) -> Position:
        """Return the position behind this many examples, as one of the first epoch; `batches` finds the true one."""
        return Position(consumed, 0, consumed)

    def next_epoch(self, position: Position) -> Position:
        """Return where the next epoch begins."""
        return Position(position.consumed, position.epoch + 1)

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each batch; see `BatchSource`.

        Raises:
            ValueError: no batch begins at the position.
        """
        begin, epoch, skipped = position.consumed - position.within, position.epoch, position.within
        has_ended = False
        while not has_ended:
            given = 0
            for batch in self._epoch(epoch):
                if given < skipped < given + len(batch):
                    raise ValueError(f'no batch begins at consumed_train_samples {position.consumed}')
                given += len(batch)
                if given > skipped:
                    part = [batch[place] for place in self._layout.part.of(len(batch))]
                    yield part, Position(begin + given, epoch, given)
            # An epoch that was skipped whole is not the one to be read.
            has_ended = given > skipped or given == 0
            begin, epoch, skipped = begin + given, epoch + 1, skipped - given
        if skipped > 0:
            raise ValueError(f'the stream has no rows at consumed_train_samples {position.consumed}')

    def _epoch(self, epoch: int) -> Iterator[list[Any]]:
        items = self._rows.items() if isinstance(self._rows, IterableDataset) else iter(self._rows)
        rows = self._log.without_refused(items, epoch=epoch)
        if self._layout.seed is not None:
            buffer_size = self._layout.shuffle_buffer
            rows = shuffled_stream(rows, seed=self._layout.seed, epoch=epoch, buffer_size=buffer_size)
        while len(batch := list(islice(rows, self._layout.batch_size))) >= self._layout.min_batch_size:
            yield batch


def _replacement(place: tuple[int, int], index: int, chosen: int, error: Exception) -> Replacement:
    epoch, position = place
    return Replacement(epoch=epoch, position=position, index=index, replacement=chosen, reason=_told(error))


def _told(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'
