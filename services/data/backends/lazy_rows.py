"""Rows of lazy datasets, which are stored unchanged and changed when they are read."""

from collections.abc import Sequence

from twinkle.dataset import DatasetMeta, LazyDataset, RefusedRow
from twinkle_services.data.backends.library_errors import row_error
from twinkle_services.data.backends.pending_steps import TemplateOf, with_pending
from twinkle_services.data.backends.row_files import as_stored
from twinkle_services.data.domain import Dataset, FilterStep, Row, TemplateStep
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
        item = view.item(position)
        if not isinstance(item, RefusedRow):
            return as_stored(item)
        pending = [
            step for step in enumerate(self._dataset.steps) if not isinstance(step[1], FilterStep | TemplateStep)
        ]
        number, step = pending[-1 - item.later_steps]
        error = row_error(item.error, number, step, dataset_id=self._dataset.dataset_id)
        # The error names the row's position in the batch; the caller needs the row's index in the dataset.
        field = error.field.replace(f'rows[{position}]', f'rows[{index}]', 1)
        raise InvalidField(field, error.problem) from item.error
