"""Rows of lazy datasets, which are stored unchanged and changed when they are read."""

from collections.abc import Sequence

from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle_services.data.backends.library_errors import step_errors
from twinkle_services.data.backends.pending_steps import TemplateOf, with_pending
from twinkle_services.data.backends.row_files import as_stored
from twinkle_services.data.domain import Dataset, Row, Table
from twinkle_services.data.ports import RowReader
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.worker import Threads


class LazyReader:
    """Applies the pending steps of a lazy dataset to the rows that are read; implements `RowReader`."""

    def __init__(self, dataset: Dataset, reader: RowReader, threads: Threads, template_of: TemplateOf) -> None:
        self._dataset, self._reader, self._threads = dataset, reader, threads
        self._template_of = template_of

    async def read(self, indices: Sequence[int]) -> list[Row]:
        rows = await self._reader.read(indices)
        return await self._threads.run(self._compute, rows, indices)

    def _compute(self, rows: Sequence[Row], indices: Sequence[int]) -> list[Row]:
        view = with_pending(LazyDataset(DatasetMeta(data=rows)), self._dataset, self._template_of)
        return [self._row(view, position, index) for position, index in enumerate(indices)]

    def _row(self, view: LazyDataset, position: int, index: int) -> Row:
        try:
            with step_errors(0, self._dataset.pending[-1], Table(rows=[])):
                return as_stored(view[position])
        except InvalidField as error:
            # The error names the row's position in the batch; the caller needs the row's index in the dataset.
            field = error.field.replace(f'rows[{position}]', f'rows[{index}]', 1)
            raise InvalidField(field, error.problem) from error
