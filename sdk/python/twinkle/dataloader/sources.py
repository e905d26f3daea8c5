"""Batches of one epoch, for datasets with indices and for streams."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice
from typing import Any, Protocol

from twinkle.dataloader.order import count_batches, epoch_order, replacement_index, shuffled_stream
from twinkle.dataloader.ranks import RankSlice
from twinkle.dataloader.replacing import BadSamples, Replacement, ReplacementLog
from twinkle.dataset import ROW_ERRORS, IterableDataset

_REPLACEMENT_SEED = 42
"""Seed of the choice of replacements if rows are not shuffled."""


class Rows(Protocol):
    """A dataset that is read by index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int, /) -> Any: ...


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Sizes and order of batches, and the part that this process reads."""

    batch_size: int
    """Number of examples per batch, over all ranks."""
    min_batch_size: int
    """Minimum size of the last batch; a smaller batch is dropped."""
    part: RankSlice
    """Part of each batch that this process reads."""
    seed: int | None
    """Seed of the random orders; None without shuffling."""
    shuffle_buffer: int
    """Number of rows in the shuffle buffer of a stream."""


@dataclass(frozen=True)
class Position:
    """A position between two batches."""

    consumed: int = 0
    """Number of examples before the position, over all epochs and ranks."""
    epoch: int = 0
    """Zero-based epoch."""
    within: int = 0
    """Number of examples of this epoch before the position."""


class BatchSource(Protocol):
    """Produces the batches of an epoch, starting at a position."""

    @property
    def size(self) -> int | None:
        """Number of rows, or None if unknown."""
        ...

    @property
    def epoch_size(self) -> int | None:
        """Number of examples per epoch, or None if unknown."""
        ...

    def located(self, consumed: int) -> Position:
        """Return the position after this many examples, counted over all epochs and ranks.

        Raises:
            ValueError: the position is not the beginning of a batch.
        """
        ...

    def next_epoch(self, position: Position) -> Position:
        """Return the beginning of the epoch that follows the epoch of `position`."""
        ...

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each remaining batch of the epoch, with the position after the batch.

        Raises:
            BadSamples: too many rows cannot be read.
        """
        ...


class IndexedBatches:
    """Batches of a dataset with indices."""

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
        """Number of batches per epoch."""
        layout = self._layout
        return count_batches(self.size, batch_size=layout.batch_size, min_batch_size=layout.min_batch_size)

    @property
    def epoch_size(self) -> int:
        """Number of examples per epoch, without the examples of a last batch that is left out."""
        return min(self.batch_count * self._layout.batch_size, self.size)

    def located(self, consumed: int) -> Position:
        """Return the position after this many examples; see `BatchSource`."""
        size = self.epoch_size
        epoch, within = divmod(consumed, size) if size else (0, 0)
        if within % self._layout.batch_size:
            raise ValueError(
                f'consumed_train_samples {consumed} is not the beginning of a batch: each epoch has {size} examples '
                f'in batches of {self._layout.batch_size}; pass a number from get_state()'
            )
        return Position(consumed, epoch, within)

    def next_epoch(self, position: Position) -> Position:
        """Return the beginning of the next epoch; the remaining examples of this epoch count as consumed."""
        return Position((position.epoch + 1) * self.epoch_size, position.epoch + 1)

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each batch; see `BatchSource`."""
        epoch, size = position.epoch, self.epoch_size
        order = epoch_order(self.size, seed=self._layout.seed, epoch=epoch)
        for offset in range(position.within, size, self._layout.batch_size):
            count = min(self._layout.batch_size, size - offset)
            positions = [offset + index for index in self._layout.part.of(count)]
            batch = [self._read(int(order[index]), (epoch, index)) for index in positions]
            yield batch, Position(epoch * size + offset + count, epoch, offset + count)

    def _read(self, index: int, epoch_position: tuple[int, int]) -> Any:
        """Return row `index`, or its replacement if the row cannot be read."""
        errors: list[Exception] = []
        for attempt in range(self._log.max_retries + 1):
            chosen = self._chosen(epoch_position, attempt) if attempt else index
            try:
                row = self._rows[chosen]
            except ROW_ERRORS as error:
                errors.append(error)
                continue
            if errors:
                self._log.add(_replacement(epoch_position, index, chosen, errors[0]))
            return row
        location = f'position {epoch_position[1]} of epoch {epoch_position[0]}'
        raise BadSamples(len(errors), location, _describe(errors[-1])) from errors[-1]

    def _chosen(self, epoch_position: tuple[int, int], attempt: int) -> int:
        seed = self._layout.seed if self._layout.seed is not None else _REPLACEMENT_SEED
        return replacement_index(self.size, seed=seed, epoch_position=epoch_position, attempt=attempt)


class StreamedBatches:
    """Batches of a stream.

    To start at a position, the stream is read up to this position, which is exact for any transformation of the rows.
    Every rank reads the whole stream and keeps its part.
    """

    def __init__(self, rows: Iterable[Any], layout: Layout, log: ReplacementLog) -> None:
        self._rows = rows
        self._layout = layout
        self._log = log

    @property
    def size(self) -> None:
        """None, because the number of rows is unknown."""
        return

    @property
    def epoch_size(self) -> None:
        """None, because the number of examples is unknown."""
        return

    def located(self, consumed: int) -> Position:
        """Return a provisional position in the first epoch; `batches` finds the actual epoch while reading."""
        return Position(consumed, 0, consumed)

    def next_epoch(self, position: Position) -> Position:
        """Return the beginning of the next epoch."""
        return Position(position.consumed, position.epoch + 1)

    def batches(self, position: Position) -> Iterator[tuple[list[Any], Position]]:
        """Yield this rank's part of each batch; see `BatchSource`.

        Raises:
            ValueError: the position is not the beginning of a batch.
            BadSamples: too many consecutive rows cannot be read.
        """
        begin, epoch, skipped = position.consumed - position.within, position.epoch, position.within
        has_ended = False
        while not has_ended:
            given = 0
            for batch in self._epoch(epoch):
                if given < skipped < given + len(batch):
                    raise ValueError(
                        f'consumed_train_samples {position.consumed} is not the beginning of a batch; pass a number '
                        'from get_state()'
                    )
                given += len(batch)
                if given > skipped:
                    part = [batch[index] for index in self._layout.part.of(len(batch))]
                    yield part, Position(begin + given, epoch, given)
            # A completely skipped epoch is followed by the next epoch.
            has_ended = given > skipped or given == 0
            begin, epoch, skipped = begin + given, epoch + 1, skipped - given
        if skipped > 0:
            raise ValueError(
                f'consumed_train_samples {position.consumed} cannot be reached: an epoch of the stream has no batches'
            )

    def _epoch(self, epoch: int) -> Iterator[list[Any]]:
        items = self._rows.items() if isinstance(self._rows, IterableDataset) else iter(self._rows)
        rows = self._log.without_refused(items, epoch=epoch)
        if self._layout.seed is not None:
            buffer_size = self._layout.shuffle_buffer
            rows = shuffled_stream(rows, seed=self._layout.seed, epoch=epoch, buffer_size=buffer_size)
        while len(batch := list(islice(rows, self._layout.batch_size))) >= self._layout.min_batch_size:
            yield batch


def _replacement(epoch_position: tuple[int, int], index: int, chosen: int, error: Exception) -> Replacement:
    epoch, position = epoch_position
    return Replacement(epoch=epoch, position=position, index=index, replacement=chosen, reason=_describe(error))


def _describe(error: Exception) -> str:
    return f'{type(error).__name__}: {error}'
