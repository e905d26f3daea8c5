"""What the verbs need of the world."""

from collections.abc import Sequence
from typing import Protocol

from services.data.domain import Dataset, HubSource, Loader, Row, Step, Table


class RowReader(Protocol):
    """Reads single rows of a stored dataset."""

    async def read(self, indices: Sequence[int]) -> list[Row]:
        """Return the rows at these indices, in this order."""
        ...


class RowEngine(Protocol):
    """Makes and changes rows."""

    async def read_hub(self, source: HubSource) -> Table:
        """Return a hub dataset's rows.

        Raises:
            HubIdNotFound: no hub, mirror or cache that can be reached has it.
            InvalidField: it has no such subset or split, or cannot be read.
        """
        ...

    async def read_file(self, path: str, file_format: str) -> Table:
        """Return an uploaded file's rows.

        Raises:
            InvalidField: the file does not hold that format.
        """
        ...

    async def mix(self, tables: Sequence[Table], *, is_interleaved: bool) -> Table:
        """Return one table of several, alternating between them or one after the other.

        Raises:
            InvalidField: some are encoded or packed and some are not, or not alike.
        """
        ...

    async def apply(self, table: Table, steps: Sequence[Step]) -> Table:
        """Return what the steps make of a table, its warnings those of these steps alone; `table` is left as it is.

        Raises:
            InvalidField: a row or an argument is wrong; names it.
            DatasetNotReady: an earlier step is missing.
            HubIdNotFound: the template's model cannot be had.
        """
        ...

    def working_out(self, dataset: Dataset, reader: RowReader) -> RowReader:
        """Return a reader of what a lazy dataset's steps make of its rows; the same rows each time.

        Its `read` raises InvalidField where a row cannot be worked out; names it.
        """
        ...


class ExportedFile(Protocol):
    """A dataset as a file."""

    @property
    def size_bytes(self) -> int:
        """Size of the whole file."""
        ...

    async def read(self, offset: int, size_bytes: int) -> bytes:
        """Return a piece; shorter at the end."""
        ...


class DatasetStore(Protocol):
    """Keeps datasets. Ids are the store's alone: whose they are is the verbs' to check."""

    def get(self, dataset_id: str) -> Dataset | None:
        """Return what is known of a dataset."""
        ...

    def of_tenant(self, tenant_id: str) -> list[Dataset]:
        """Return a tenant's datasets, in no order."""
        ...

    async def save(self, dataset: Dataset, table: Table) -> Dataset:
        """Keep a dataset and its rows in one step, in place of an earlier revision; return it with its digest.

        Cancellation: what has begun is done to its end.
        """
        ...

    async def load(self, dataset: Dataset) -> Table:
        """Return all rows, without warnings."""
        ...

    def reader(self, dataset: Dataset) -> RowReader:
        """Return a reader of this revision; it stays usable when the dataset changes."""
        ...

    async def export(self, dataset: Dataset, file_format: str) -> ExportedFile:
        """Return the dataset as a file; the same revision always gives the same bytes.

        Raises:
            InvalidField: the format cannot hold these rows.
        """
        ...

    async def delete(self, dataset: Dataset) -> None:
        """Forget a dataset and its rows."""
        ...


class LoaderStore(Protocol):
    """Keeps open loaders."""

    def get(self, loader_id: str) -> Loader | None:
        """Return a loader."""
        ...

    def of_tenant(self, tenant_id: str) -> list[Loader]:
        """Return a tenant's loaders, in no order."""
        ...

    async def save(self, loader: Loader) -> None:
        """Keep a loader."""
        ...

    async def delete(self, loader_id: str) -> None:
        """Forget a loader; nothing happens where there is none."""
        ...
