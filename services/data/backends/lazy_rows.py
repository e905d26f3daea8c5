"""Lazy datasets, whose rows are stored unchanged: most steps are applied to each row when it is read."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from twinkle.dataset import DatasetMeta, IterableDataset, LazyDataset
from twinkle.dataset.row_steps import is_kept
from twinkle.preprocessor import build_filter, build_preprocessor, report_of
from twinkle.template import Template
from twinkle_services.data.backends.library_errors import step_errors
from twinkle_services.data.backends.row_files import as_stored
from twinkle_services.data.domain import (
    CheckStep,
    Dataset,
    EncodeStep,
    FilterStep,
    MapStep,
    PackStep,
    Row,
    Step,
    Table,
    TemplateStep,
)
from twinkle_services.data.ports import RowReader
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.worker import Threads

TemplateOf = Callable[[TemplateStep], Template]


def apply_lazily(table: Table, steps: Sequence[Step], template_of: TemplateOf) -> Table:
    """Apply filters and set templates now; make all other steps pending after checking their arguments and order.

    Raises:
        InvalidField, UnknownComponent, DatasetNotReady, HubIdNotFound: A step cannot be applied to this table.
    """
    table = replace(table, warnings=[])
    for index, step in enumerate(steps):
        with step_errors(index, step, table):
            table = _with_step(table, step, template_of)
        if not table.rows:
            table.warnings.append(f'no rows are left after {step.kind}')
    return table


def _with_step(table: Table, step: Step, template_of: TemplateOf) -> Table:
    match step:
        case TemplateStep():
            _view(table, template_of).set_template(template_of(step))
            return replace(table, template=step)
        case FilterStep():
            return _filtered(table, step, template_of)
        case MapStep() | EncodeStep() | CheckStep():
            # This call raises if the step is invalid; it does not read the rows.
            add_step(_view(table, template_of), step)
            is_encoded = table.is_encoded or isinstance(step, EncodeStep)
            return replace(table, pending=(*table.pending, step), is_encoded=is_encoded)
        case PackStep():
            problem = 'must not contain pack, which needs all rows at once; create an eager dataset instead'
            raise InvalidField('steps', problem)


def _filtered(table: Table, step: FilterStep, template_of: TemplateOf) -> Table:
    accepts = build_filter(step.filter, step.init_args)
    view = _view(table, template_of)
    accepted = [row for index, row in enumerate(table.rows) if is_kept(view[index], accepts, index=index)]
    return replace(table, rows=accepted, warnings=[*table.warnings, *report_of(accepts)])


def _view(table: Table, template_of: TemplateOf) -> LazyDataset:
    """Return a view of the rows that applies the pending steps to each row when it is read."""
    template = None if table.template is None else template_of(table.template)
    view = LazyDataset(DatasetMeta(data=table.rows), template=template)
    for step in table.pending:
        add_step(view, step)
    return view


def add_step(view: LazyDataset | IterableDataset, step: Step) -> None:
    """Add a step to a dataset that changes rows when they are read."""
    match step:
        case MapStep():
            view.map(build_preprocessor(step.preprocessor, step.init_args))
        case EncodeStep():
            view.encode(add_generation_prompt=step.is_generation_prompt_added, format=step.row_format)
        case CheckStep():
            view.check(format=step.row_format)
        case _:
            raise ValueError(f'{step.kind} cannot be pending')


class LazyReader:
    """Applies the pending steps of a lazy dataset to the rows that are read; implements `RowReader`."""

    def __init__(self, dataset: Dataset, reader: RowReader, threads: Threads, template_of: TemplateOf) -> None:
        self._dataset, self._reader, self._threads = dataset, reader, threads
        self._template_of = template_of

    async def read(self, indices: Sequence[int]) -> list[Row]:
        rows = await self._reader.read(indices)
        return await self._threads.run(self._compute, rows, indices)

    def _compute(self, rows: Sequence[Row], indices: Sequence[int]) -> list[Row]:
        dataset = self._dataset
        table = Table(rows=list(rows), is_lazy=True, pending=dataset.pending, template=dataset.template)
        view = _view(table, self._template_of)
        return [self._row(view, position, index) for position, index in enumerate(indices)]

    def _row(self, view: LazyDataset, position: int, index: int) -> Row:
        try:
            with step_errors(0, self._dataset.pending[-1], Table(rows=[])):
                return as_stored(view[position])
        except InvalidField as error:
            # The error names the row's position in the batch; the caller needs the row's index in the dataset.
            field = error.field.replace(f'rows[{position}]', f'rows[{index}]', 1)
            raise InvalidField(field, error.problem) from error
