"""Batches from loaders of the data service: references, content and the port that fetches them."""

from dataclasses import dataclass, field
from typing import Protocol


@dataclass(frozen=True, kw_only=True)
class LoaderCursor:
    """A position between two batches of a loader."""

    consumed_rows: int
    """Number of examples before the position, counted over all epochs."""
    state: bytes = b''
    """Opaque state with which the data service verifies the position. If empty, the service checks only that a batch
    starts there."""


@dataclass(frozen=True, kw_only=True)
class BatchReference:
    """A reference to the batch after a cursor. It always refers to the same batch."""

    loader_id: str
    cursor: LoaderCursor | None = None
    """Position of the batch; None for the first batch."""


@dataclass(frozen=True, kw_only=True)
class LoadedBatch:
    """A fetched batch."""

    content: bytes = field(repr=False)
    """The examples as a serialized FeatureBatch message; the domain does not parse it."""
    next_cursor: LoaderCursor
    """The position after the batch."""


class BatchSource(Protocol):
    """Fetches batches of loaders on behalf of the current caller. Contract suite: tests/contract/model."""

    async def load(self, reference: BatchReference) -> LoadedBatch:
        """Return a batch; repeated calls return the same batch.

        Raises:
            ForwardedError: The data service refused the call, for example with NOT_FOUND for another tenant's loader.
            InvalidField: The cursor does not belong to the loader, or the batch is too large.
            LoaderAtEnd: The loader has no batch at this position.
            ServiceUnreachable: The data service cannot be reached.
            NotBuiltYet: This deployment has no data service.
        """
        ...
