"""Loaders and positions in what they read."""

import hashlib
from dataclasses import dataclass

from services.kit.errors import InvalidField

MAX_CREDITS = 64
"""Most batches that may be on their way to one reader."""


@dataclass(frozen=True)
class Cursor:
    """A position between two batches."""

    consumed_rows: int
    """Examples before it, counted over all epochs."""
    state: bytes
    """Ties the count to what was read and how."""


@dataclass(frozen=True, kw_only=True)
class Loader:
    """An opened reading of a dataset."""

    loader_id: str
    tenant_id: str
    dataset_id: str
    content_digest: str
    """Of the dataset it reads."""
    row_count: int
    """Rows of the dataset."""
    batch_size: int
    shuffle_seed: int | None
    """None: the dataset's order."""
    epoch_count: int
    """Passes over the dataset; 0: without end."""
    is_last_partial_dropped: bool
    request_id: str
    fingerprint: str

    @property
    def epoch_rows(self) -> int:
        """Examples of one epoch, those of a last batch that is left out not counted."""
        return self.row_count - self.row_count % self.batch_size if self.is_last_partial_dropped else self.row_count

    @property
    def batch_count(self) -> int:
        """Batches of one epoch."""
        return -(-self.epoch_rows // self.batch_size)

    @property
    def end_row(self) -> int | None:
        """Examples of all epochs; None if they have no end."""
        return self.epoch_rows * self.epoch_count if self.epoch_count or not self.epoch_rows else None

    def cursor_at(self, consumed_rows: int) -> Cursor:
        """Return the position behind `consumed_rows` examples."""
        return Cursor(consumed_rows, self._state(consumed_rows))

    def rows_before(self, cursor: Cursor) -> int:
        """Return the examples before a cursor.

        A cursor fits every loader that reads the same content in the same batches and order, so a
        run can be taken up by another program with a loader of its own. One that is a count alone, as a
        checkpoint keeps it, fits wherever a batch begins there.

        Raises:
            InvalidField: it was made for another content, batch size or order, or was changed.
        """
        if not cursor.state:
            self._check_begin(cursor.consumed_rows)
        elif cursor.state != self._state(cursor.consumed_rows):
            problem = 'was not made by a loader of the same rows, batch size and shuffle seed; begin without a cursor'
            raise InvalidField('start.cursor', problem)
        return cursor.consumed_rows

    def _check_begin(self, consumed_rows: int) -> None:
        within = consumed_rows % self.epoch_rows if self.epoch_rows else consumed_rows
        is_past = self.end_row is not None and consumed_rows > self.end_row
        if is_past or within % self.batch_size:
            problem = f'must be where a batch of {self.batch_size} begins; each epoch of {self.epoch_rows} begins anew'
            raise InvalidField('start.cursor.consumed_rows', problem)

    def _state(self, consumed_rows: int) -> bytes:
        order = (self.content_digest, self.batch_size, self.shuffle_seed, self.is_last_partial_dropped)
        return hashlib.blake2s(repr((order, consumed_rows)).encode(), digest_size=16).digest()
