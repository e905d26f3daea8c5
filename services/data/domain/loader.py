"""Loaders and their cursors. A cursor is a position in the sequence of rows that a loader reads."""

import hashlib
from dataclasses import dataclass

from twinkle_services.kit.errors import InvalidField

MAX_CREDITS = 64
"""Maximum number of batches in transit to one reader."""


@dataclass(frozen=True)
class Cursor:
    """A position between two batches."""

    consumed_rows: int
    """Number of rows before the position, counted over all epochs."""
    state: bytes
    """Digest of the position and of the content, batch size and order that the loader reads; empty if the cursor
    contains only `consumed_rows`."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """An open loader, which reads a dataset in batches."""

    loader_id: str
    tenant_id: str
    dataset_id: str
    content_digest: str
    """Digest of the dataset's content."""
    row_count: int
    """Number of rows of the dataset; 0 if it is streamed."""
    batch_size: int
    shuffle_seed: int | None
    """Seed of the order of rows; None for the order of the dataset."""
    epoch_count: int
    """Number of epochs; 0 for an unlimited number."""
    is_last_partial_dropped: bool
    """Whether each epoch omits its last batch if the batch is not full."""
    request_id: str
    fingerprint: str
    is_streamed: bool = False
    """Whether the rows are read from a hub, so that their number is unknown."""

    @property
    def epoch_rows(self) -> int:
        """Number of rows of one epoch, without the rows of an omitted last batch."""
        return self.row_count - self.row_count % self.batch_size if self.is_last_partial_dropped else self.row_count

    @property
    def batch_count(self) -> int:
        """Number of batches of one epoch."""
        return -(-self.epoch_rows // self.batch_size)

    @property
    def end_row(self) -> int | None:
        """Number of rows of all epochs; None if the number of epochs is unlimited."""
        return self.epoch_rows * self.epoch_count if self.epoch_count or not self.epoch_rows else None

    def cursor_at(self, consumed_rows: int) -> Cursor:
        """Return the position after `consumed_rows` rows."""
        return Cursor(consumed_rows, self._state(consumed_rows))

    def rows_before(self, cursor: Cursor) -> int:
        """Return the number of rows before a cursor.

        A cursor fits every loader that reads the same content in the same batches and order, so another program can
        continue a run with a different loader. A cursor without a digest, as stored in a checkpoint, fits if a batch
        begins at its row; for a stream, this is checked completely when its rows are read, see `BatchStream`.

        Raises:
            InvalidField: The cursor belongs to different content or to a different batch size or order, was modified,
                is not at a batch boundary, or is beyond the last row.
        """
        if not cursor.state and self.is_streamed:
            if self.is_last_partial_dropped and cursor.consumed_rows % self.batch_size:
                raise self.refusal(cursor.consumed_rows)
        elif not cursor.state:
            self.check_begin(cursor.consumed_rows)
        elif cursor.state != self._state(cursor.consumed_rows):
            problem = 'belongs to a loader with different rows, batches or order; start without a cursor'
            raise InvalidField('start.cursor', problem)
        return cursor.consumed_rows

    def check_begin(self, consumed_rows: int) -> None:
        """Check that `consumed_rows` rows end at a batch boundary. The number of rows of the dataset must be known.

        Raises:
            InvalidField: A batch neither begins there nor ends there, or the position is beyond the last row.
        """
        row_in_epoch = consumed_rows % self.epoch_rows if self.epoch_rows else consumed_rows
        is_past = self.end_row is not None and consumed_rows > self.end_row
        if is_past or row_in_epoch % self.batch_size:
            raise self.refusal(consumed_rows)

    def refusal(self, consumed_rows: int) -> InvalidField:
        """Return the error for a position that is not at a batch boundary."""
        problem = f'is {consumed_rows}, must be a batch boundary up to the end of the loader; a batch has '
        rows = f', an epoch {self.epoch_rows}' if self.epoch_rows or not self.is_streamed else ''
        return InvalidField('start.cursor.consumed_rows', f'{problem}{self.batch_size} rows{rows}')

    def _state(self, consumed_rows: int) -> bytes:
        order = (self.content_digest, self.batch_size, self.shuffle_seed, self.is_last_partial_dropped)
        return hashlib.blake2s(repr((order, consumed_rows)).encode(), digest_size=16).digest()
