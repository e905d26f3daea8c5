"""A batch of a loader of the data service: where it is, what was there, and what gives it."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class LoaderCursor:
    """A position between two batches of a loader."""

    consumed_rows: int
    """Examples before it, counted over all epochs."""
    state: bytes = b''
    """Ties the count to what is read and how; empty: the count alone is believed."""


@dataclass(frozen=True, kw_only=True)
class BatchReference:
    """Which batch: the one after a position. The same reference always holds the same batch."""

    loader_id: str
    cursor: LoaderCursor | None = None
    """None: before the first batch."""


@dataclass(frozen=True, kw_only=True)
class LoadedBatch:
    """What a loader gave."""

    content: bytes = field(repr=False)
    """The examples, serialised as the contract's FeatureBatch; opaque here."""
    next_cursor: LoaderCursor
    """The position after them."""


class BatchSource(Protocol):
    """Gives batches of loaders; acts for the current caller. Contract suite: tests/contract/model."""

    async def load(self, reference: BatchReference) -> LoadedBatch:
        """Return the batch at a reference, the same each time.

        Raises:
            ForwardedError: as the contract of StreamBatches says; NOT_FOUND for a loader that is not the caller's.
            InvalidField: the cursor is of another loader, or the batch is too large.
            LoaderAtEnd: there is none.
            ServiceUnreachable: the data service is away.
            NotBuiltYet: this deployment has none.
        """
        ...
