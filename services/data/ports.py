"""Ports of the data service: an engine that prepares rows, and stores of datasets and loaders."""

from collections.abc import Sequence
from typing import Protocol

from twinkle_services.data.domain import Dataset, HubSource, HubStream, Loader, Row, RowMeter, Step, Table
from twinkle_services.kit.errors import InvalidField


class RowReader(Protocol):
    """Reads single rows of a stored dataset."""

    async def read(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at these indices, in this order."""
        ...


class BatchStream(Protocol):
    """Reads the batches of a streamed dataset, in order.

    Concurrency: one task at a time calls `next`.
    """

    @property
    def consumed(self) -> int:
        """Number of rows before the next batch, over all epochs."""
        ...

    @property
    def is_failed(self) -> bool:
        """Whether a batch could not be read, so that another stream is needed."""
        ...

    @property
    def is_reading(self) -> bool:
        """Whether rows are being read for the next call, for example up to the position of the stream."""
        ...

    async def next(self) -> tuple[list[Row], int] | None:
        """Return the rows of the next batch and their epoch; None after the last epoch.

        Cancellation: reading continues, and the next call returns the batch.

        Raises:
            PositionNotReached: The stream is still being read up to its first batch. Reading continues, as after a
                cancellation.
            InvalidField: The position is not the beginning of a batch, the position is beyond the last row, the rows
                cannot be read, or a row cannot be computed.
            QuotaExceeded, BytesFull: The rows of a batch take too much memory.
            ServiceUnreachable: The hub does not respond, or has no such dataset any more.
        """
        ...

    def close(self) -> None:
        """Stop reading. Idempotent."""
        ...


class RowEngine(Protocol):
    """Reads rows from their sources and applies steps to them.

    The `meter` of a method counts the rows that the method creates. Errors of the meter (QuotaExceeded, BytesFull,
    Cancelled) stop the method.
    """

    async def read_hub(self, source: HubSource, meter: RowMeter) -> Table:
        """Return the rows of a hub dataset.

        Raises:
            HubIdNotFound: The id is not on any hub, mirror or cache that this service can reach.
            InvalidField: The dataset has no such subset or split, cannot be read, or is too large to be downloaded.
        """
        ...

    async def find_stream(self, source: HubSource) -> HubStream:
        """Return the current revision of a hub dataset and its columns, without storing rows.

        Cancellation: takes effect when the process that reads the hub has ended, so that cancelled calls of a tenant do
        not leave processes behind. The same applies to `stream_rows`.

        Raises:
            HubIdNotFound: See `read_hub`.
            InvalidField: The dataset has no such subset or split, cannot be read, or cannot be streamed.
        """
        ...

    def stream(self, dataset: Dataset, loader: Loader, *, consumed: int) -> BatchStream:
        """Return the batches that a loader of a streamed dataset reads after `consumed` rows."""
        ...

    async def stream_rows(self, dataset: Dataset, *, begin: int, count: int) -> Sequence[Row | InvalidField]:
        """Return at most `count` rows of a streamed dataset from index `begin` on, or the errors of rows.

        Raises:
            InvalidField, ServiceUnreachable, QuotaExceeded, BytesFull: See `BatchStream.next`.
        """
        ...

    async def read_file(self, path: str, file_format: str, meter: RowMeter) -> Table:
        """Return the rows of an uploaded file.

        Raises:
            InvalidField: The file does not have that format.
        """
        ...

    async def mix(self, tables: Sequence[Table], *, is_interleaved: bool) -> Table:
        """Combine the rows of several tables, either interleaved or one table after another.

        Raises:
            InvalidField: The tables differ in their preparation, a table is lazy, only some tables are streamed, or too
                many streamed tables are to be interleaved.
        """
        ...

    async def apply(self, table: Table, steps: Sequence[Step], meter: RowMeter) -> Table:
        """Return the result of the steps, with only the warnings of these steps; `table` does not change.

        Raises:
            InvalidField: A row or an argument is invalid.
            UnknownComponent: A preprocessor, filter or template is unknown.
            DatasetNotReady: A required earlier step is missing, or a step was already applied.
            HubIdNotFound: The template's model was not found.
        """
        ...

    def lazy_reader(self, dataset: Dataset, reader: RowReader) -> RowReader:
        """Return a reader that applies a lazy dataset's pending steps to the rows of `reader`.

        The same indices always return the same rows. The `read` method of the result raises InvalidField, with the
        row's index in the dataset, if a row cannot be computed.
        """
        ...


class ExportedFile(Protocol):
    """A dataset as a file."""

    @property
    def size_bytes(self) -> int:
        """Size of the complete file."""
        ...

    async def read(self, offset: int, size_bytes: int) -> bytes:
        """Return `size_bytes` bytes from `offset` on, or fewer at the end."""
        ...


class DatasetStore(Protocol):
    """Stores datasets by tenant and id.

    Asynchronous methods raise StoreUnavailable if the disk cannot be used at the moment.
    """

    def get(self, tenant_id: str, dataset_id: str) -> Dataset | None:
        """Return the description of a tenant's dataset; None if the tenant has no such dataset.

        Raises:
            StoredDataDamaged: The stored description is damaged, and the dataset belongs to the tenant or to an unknown
                tenant.
        """
        ...

    def of_tenant(self, tenant_id: str) -> list[Dataset]:
        """Return the datasets of a tenant, without damaged ones, in no particular order."""
        ...

    async def stored_bytes(self, tenant_id: str) -> int:
        """Return the size of all files of a tenant's datasets, including exported files."""
        ...

    async def save(self, dataset: Dataset, table: Table) -> Dataset:
        """Create or replace a dataset and its rows atomically, and return the dataset with its content digest.

        Cancellation: a change that has begun is completed.
        """
        ...

    async def load(self, dataset: Dataset, meter: RowMeter) -> Table:
        """Return all rows, without warnings.

        Raises:
            QuotaExceeded, BytesFull: The meter refused the rows.
            StoredDataDamaged: The stored rows are damaged.
        """
        ...

    async def reader(self, dataset: Dataset) -> RowReader:
        """Return a reader of this revision, which remains usable after the dataset changes.

        Raises:
            StoredDataDamaged: The stored rows are damaged; `read` may raise it too.
        """
        ...

    async def export(self, dataset: Dataset, file_format: str, meter: RowMeter, *, offset: int) -> ExportedFile:
        """Return the dataset as a file to read from byte `offset` on; the same revision always yields the same bytes.

        Raises:
            QuotaExceeded, BytesFull: The meter refused the rows, which are counted only for formats with columns.
            StoredDataDamaged: The stored rows are damaged.
            InvalidField: The format cannot represent these rows, or the offset exceeds the file. Nothing is stored.
        """
        ...

    async def delete_damaged(self, tenant_id: str, dataset_id: str) -> bool:
        """Delete a dataset of a tenant if its description is damaged, and return whether it was deleted."""
        ...

    async def delete(self, dataset: Dataset) -> None:
        """Delete a dataset and its rows."""
        ...


class LoaderStore(Protocol):
    """Stores open loaders by id. The use cases check which tenant owns a loader.

    Asynchronous methods raise StoreUnavailable if the disk cannot be used at the moment.
    """

    def get(self, loader_id: str) -> Loader | None:
        """Return a loader; None if it does not exist.

        Raises:
            StoredDataDamaged: The stored loader is damaged.
        """
        ...

    def of_tenant(self, tenant_id: str) -> list[Loader]:
        """Return the loaders of a tenant, without damaged ones, in no particular order."""
        ...

    async def save(self, loader: Loader) -> None:
        """Store a loader."""
        ...

    async def delete(self, loader_id: str) -> None:
        """Delete a loader; if it does not exist, do nothing."""
        ...
