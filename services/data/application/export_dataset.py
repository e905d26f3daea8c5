"""Export a dataset as a file."""

from collections.abc import AsyncGenerator
from dataclasses import dataclass

from services.data.application.ownership import dataset_of
from services.data.ports import DatasetStore
from services.kit.caller import Caller
from services.kit.errors import InvalidField

CHUNK_BYTES = 1 << 20


@dataclass(frozen=True)
class Piece:
    """Bytes of a file."""

    offset: int
    data: bytes


class ExportDataset:
    """Sends datasets as files."""

    def __init__(self, store: DatasetStore) -> None:
        """Export what `store` keeps."""
        self._store = store

    async def __call__(
        self, caller: Caller, dataset_id: str, *, file_format: str, offset: int
    ) -> AsyncGenerator[Piece]:
        """Yield the file from byte `offset` on; the same dataset always gives the same bytes.

        Raises:
            DatasetNotFound: not the caller's.
            InvalidField: the dataset is lazy, the format cannot hold the rows, or the offset is beyond the end.
        """
        dataset = dataset_of(self._store, caller, dataset_id)
        if dataset.is_lazy:
            raise InvalidField(
                'dataset_id', 'is lazy: its rows are worked out when a loader reads them; export an eager one'
            )
        file = await self._store.export(dataset, file_format)
        if offset > file.size_bytes:
            raise InvalidField('offset', f'must be at most {file.size_bytes}, the size of the file')
        for begin in range(offset, file.size_bytes, CHUNK_BYTES):
            yield Piece(begin, await file.read(begin, CHUNK_BYTES))
