"""Rows of lazy datasets: kept as they came, and worked out when they are read."""

from collections.abc import Callable, Sequence
from dataclasses import replace

from services.data.backends.library_errors import facts_of_step
from services.data.backends.row_files import as_kept
from services.data.domain import (
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
from services.data.ports import RowReader
from services.kit.errors import InvalidField
from services.kit.worker import Threads
from twinkle.dataset import DatasetMeta, LazyDataset
from twinkle.dataset.row_steps import is_kept
from twinkle.preprocessor import build_filter, build_preprocessor, report_of
from twinkle.template import Template

TemplateOf = Callable[[TemplateStep], Template]


def apply_lazily(table: Table, steps: Sequence[Step], template_of: TemplateOf) -> Table:
    """Return a table with the steps noted, and its rows filtered; everything but the rows is checked now.

    Raises:
        InvalidField, UnknownComponent, DatasetNotReady, HubIdNotFound: a step is of no use here.
    """
    table = replace(table, warnings=[])
    for index, step in enumerate(steps):
        with facts_of_step(index, step, table):
            table = _noted(table, step, template_of)
        if not table.rows:
            table.warnings.append(f'no rows are left after {step.kind}')
    return table


def _noted(table: Table, step: Step, template_of: TemplateOf) -> Table:
    match step:
        case TemplateStep():
            _view(table, template_of).set_template(template_of(step))
            return replace(table, template=step)
        case FilterStep():
            return _filtered(table, step, template_of)
        case MapStep() | EncodeStep() | CheckStep():
            # Everything but the rows is refused now.
            _do(_view(table, template_of), step)
            is_encoded = table.is_encoded or isinstance(step, EncodeStep)
            return replace(table, pending=(*table.pending, step), is_encoded=is_encoded)
        case PackStep():
            raise InvalidField(
                'steps', 'pack looks at all rows together, which a lazy dataset does not; make an eager one'
            )


def _filtered(table: Table, step: FilterStep, template_of: TemplateOf) -> Table:
    accepts = build_filter(step.filter, step.init_args)
    view = _view(table, template_of)
    kept = [row for index, row in enumerate(table.rows) if is_kept(view[index], accepts, index=index)]
    return replace(table, rows=kept, warnings=[*table.warnings, *report_of(accepts)])


def _view(table: Table, template_of: TemplateOf) -> LazyDataset:
    """Return what the steps that are noted make of the rows, each when it is read."""
    template = None if table.template is None else template_of(table.template)
    view = LazyDataset(DatasetMeta(data=table.rows), template=template)
    for step in table.pending:
        _do(view, step)
    return view


def _do(view: LazyDataset, step: Step) -> None:
    match step:
        case MapStep():
            view.map(build_preprocessor(step.preprocessor, step.init_args))
        case EncodeStep():
            view.encode(add_generation_prompt=step.is_generation_prompt_added)
        case CheckStep():
            view.check()
        case _:
            raise ValueError(f'{step.kind} is never done later')


class LazyReader:
    """Works out the rows that are read of a lazy dataset; implements `RowReader`."""

    def __init__(self, dataset: Dataset, reader: RowReader, threads: Threads, template_of: TemplateOf) -> None:
        """Read stored rows by `reader`, and work in `threads`."""
        self._dataset, self._reader, self._threads = dataset, reader, threads
        self._template_of = template_of

    async def read(self, indices: Sequence[int]) -> list[Row]:
        """Return what the rows at these indices become, in this order."""
        rows = await self._reader.read(indices)
        return await self._threads.run(self._worked_out, rows, indices)

    def _worked_out(self, rows: Sequence[Row], indices: Sequence[int]) -> list[Row]:
        dataset = self._dataset
        table = Table(rows=list(rows), is_lazy=True, pending=dataset.pending, template=dataset.template)
        view = _view(table, self._template_of)
        return [self._row(view, place, index) for place, index in enumerate(indices)]

    def _row(self, view: LazyDataset, place: int, index: int) -> Row:
        try:
            with facts_of_step(0, self._dataset.pending[-1], Table(rows=[])):
                return as_kept(view[place])
        except InvalidField as error:
            # The batch counts from 0; its owner counts from the first row of the dataset.
            field = error.field.replace(f'rows[{place}]', f'rows[{index}]', 1)
            raise InvalidField(field, error.problem) from error
