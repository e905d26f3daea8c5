"""Pending steps of lazy and streamed datasets, which are applied to rows when they are read."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from twinkle.dataset import DatasetMeta, IterablePackingDataset, LazyDataset
from twinkle.dataset.row_steps import is_kept
from twinkle.preprocessor import build_filter, build_preprocessor, report_of
from twinkle.template import Template
from twinkle_services.data.backends.library_errors import step_errors
from twinkle_services.data.domain import (
    CheckStep,
    Dataset,
    EncodeStep,
    FilterStep,
    MapStep,
    PackStep,
    Step,
    Table,
    TemplateStep,
)
from twinkle_services.kit.errors import InvalidField

TemplateOf = Callable[[TemplateStep], Template]
_View = TypeVar('_View', bound=LazyDataset | IterablePackingDataset)


def apply_pending(table: Table, steps: Sequence[Step], template_of: TemplateOf) -> Table:
    """Make steps of a lazy or streamed table pending after checking their arguments and order.

    Templates are set now, and filters of a lazy table are applied now.

    Raises:
        InvalidField, UnknownComponent, DatasetNotReady, HubIdNotFound: A step cannot be applied to this table.
    """
    table = replace(table, warnings=[])
    for index, step in enumerate(steps):
        with step_errors(index, step, table):
            table = _with_step(table, step, template_of)
        if table.is_lazy and not table.rows:
            table.warnings.append(f'no rows are left after {step.kind}')
    return table


def with_pending(view: _View, table: Table | Dataset, template_of: TemplateOf) -> _View:
    """Add the template and the pending steps of a dataset to a view of its rows, and return the view."""
    if table.template is not None:
        view.template = template_of(table.template)
    for step in table.pending:
        add_step(view, step)
    return view


def _with_step(table: Table, step: Step, template_of: TemplateOf) -> Table:
    kind = LazyDataset if table.is_lazy else IterablePackingDataset
    view = with_pending(kind(DatasetMeta(data=table.rows)), table, template_of)
    match step:
        case TemplateStep():
            view.set_template(template_of(step))
            return replace(table, template=step)
        case FilterStep() if isinstance(view, LazyDataset):
            return _filtered(table, view, step)
        case PackStep() if isinstance(view, LazyDataset):
            problem = 'must not contain pack, which needs all rows at once; create an eager dataset instead'
            raise InvalidField('steps', problem)
        case _:
            # This call raises if the step is invalid; it does not read the rows.
            add_step(view, step)
            return replace(
                table,
                pending=(*table.pending, step),
                is_encoded=table.is_encoded or isinstance(step, EncodeStep),
                is_packed=table.is_packed or isinstance(step, PackStep),
            )


def _filtered(table: Table, view: LazyDataset, step: FilterStep) -> Table:
    accepts = build_filter(step.filter, step.init_args)
    accepted = [row for index, row in enumerate(table.rows) if is_kept(view[index], accepts, index=index)]
    return replace(table, rows=accepted, warnings=[*table.warnings, *report_of(accepts)])


def add_step(view: LazyDataset | IterablePackingDataset, step: Step, part: DatasetMeta | None = None) -> None:
    """Add a step to a view, or to one of its parts; the step is applied to each row when the row is read."""
    match step:
        case MapStep():
            view.map(build_preprocessor(step.preprocessor, step.init_args), part)
        case EncodeStep():
            view.encode(add_generation_prompt=step.is_generation_prompt_added, format=step.row_format)
        case CheckStep():
            view.check(format=step.row_format)
        case FilterStep() if isinstance(view, IterablePackingDataset):
            view.filter(build_filter(step.filter, step.init_args), part)
        case PackStep() if isinstance(view, IterablePackingDataset):
            view.pack_dataset()
        case _:
            raise ValueError(f'{step.kind} cannot be pending')
