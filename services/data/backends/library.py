"""Rows made and changed by the component library, and its errors as this service's facts."""

from collections.abc import Callable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from services.data.backends.lazy_rows import LazyReader, apply_lazily
from services.data.backends.library_errors import facts_of_source, facts_of_step
from services.data.domain import (
    CheckStep,
    Dataset,
    EncodeStep,
    FilterStep,
    HubSource,
    MapStep,
    PackStep,
    Step,
    Table,
    TemplateStep,
)
from services.data.ports import RowReader
from services.kit.errors import InvalidField
from services.kit.worker import Threads
from twinkle.data_format import IGNORE_INDEX
from twinkle.dataset import DatasetMeta, NotReady, PackingDataset, load_rows, read_rows
from twinkle.hub import HubError, local_path
from twinkle.preprocessor import build_filter, build_preprocessor, report_of
from twinkle.template import Template, build_template

_REPORTED_ROWS = 20
"""Most rows a check names one by one."""


class LibraryEngine:
    """Implements `RowEngine` with `twinkle.dataset`."""

    def __init__(
        self, threads: Threads, *, base_models: Sequence[str], local_roots: Sequence[Path], template_cache: int
    ) -> None:
        """Work in `threads`.

        Args:
            threads: where rows are worked on.
            base_models: models that may be folders.
            local_roots: folders from which datasets may be read by path.
            template_cache: templates kept ready.
        """
        self._threads = threads
        self._base_models = frozenset(base_models)
        self._local_roots = [root.resolve() for root in local_roots]
        self._template = lru_cache(maxsize=template_cache)(self._build_template)

    async def read_hub(self, source: HubSource) -> Table:
        """Return a hub dataset's rows."""
        return await self._threads.run(self._read_hub, source)

    async def read_file(self, path: str, file_format: str) -> Table:
        """Return an uploaded file's rows."""
        with facts_of_source('source.upload'):
            return Table(rows=list(await self._threads.run(read_rows, Path(path), file_format)))

    async def mix(self, tables: Sequence[Table], *, is_interleaved: bool) -> Table:
        """Return one table of several."""
        return await self._threads.run(_mix, tables, is_interleaved=is_interleaved)

    async def apply(self, table: Table, steps: Sequence[Step]) -> Table:
        """Return what the steps make of a table."""
        if table.is_lazy:
            return await self._threads.run(apply_lazily, table, steps, self._template)
        return await self._threads.run(self._apply, table, steps)

    def working_out(self, dataset: Dataset, reader: RowReader) -> RowReader:
        """Return a reader of what a lazy dataset's steps make of its rows."""
        return LazyReader(dataset, reader, self._threads, self._template)

    def _read_hub(self, source: HubSource) -> Table:
        is_local = self._is_readable_path(source.dataset_id)
        meta = DatasetMeta(
            source.dataset_id,
            subset_name=source.subset_name,
            split=source.split,
            data_slice=slice(source.begin_row, source.end_row),
        )
        with facts_of_source('source.hub', hub_id=source.dataset_id):
            return Table(rows=list(load_rows(meta, is_local_allowed=is_local)))

    def _is_readable_path(self, dataset_id: str) -> bool:
        path = local_path(dataset_id)
        return path is not None and any(path.resolve().is_relative_to(root) for root in self._local_roots)

    def _apply(self, table: Table, steps: Sequence[Step]) -> Table:
        work = _Work(table, self._template)
        for index, step in enumerate(steps):
            with facts_of_step(index, step, table):
                work.do(step)
        return work.table()

    def _build_template(self, step: TemplateStep) -> Template:
        if step.base_model not in self._base_models and local_path(step.base_model) is not None:
            # What is a path here is nobody's business; a model of that name may still be on a hub.
            raise HubError('no such model')
        return build_template(
            step.name,
            model_id=step.base_model,
            max_length=step.max_length,
            truncation_strategy=step.truncation_strategy,
            default_system=step.default_system,
            enable_thinking=step.is_thinking_enabled,
            # Features on the wire carry no pixels yet, and a client must not name files of this machine.
            is_media_read=False,
        )


class _Work:
    """A table on its way through steps."""

    def __init__(self, table: Table, template_of: Callable[[TemplateStep], Template]) -> None:
        self._dataset = PackingDataset(DatasetMeta(data=table.rows))
        self._dataset.is_encoded, self._dataset.is_packed = table.is_encoded, table.is_packed
        self._step = table.template
        self._template_of = template_of
        self._warnings: list[str] = []

    def do(self, step: Step) -> None:
        dataset = self._dataset
        match step:
            case MapStep():
                preprocessor = build_preprocessor(step.preprocessor, step.init_args)
                dataset.map(preprocessor)
                self._warnings += report_of(preprocessor)
            case FilterStep():
                row_filter = build_filter(step.filter, step.init_args)
                dataset.filter(row_filter)
                self._warnings += report_of(row_filter)
            case TemplateStep():
                dataset.set_template(self._template_of(step))
                self._step = step
            case EncodeStep():
                self._prepare_template()
                self._warnings += dataset.encode(add_generation_prompt=step.is_generation_prompt_added)
            case PackStep():
                self._prepare_template()
                dataset.pack_dataset()
            case CheckStep():
                self._warnings += self._check()
        if not len(dataset):
            self._warnings.append(f'no rows are left after {step.kind}')

    def table(self) -> Table:
        dataset = self._dataset
        return Table(
            rows=list(dataset),
            is_encoded=dataset.is_encoded,
            is_packed=dataset.is_packed,
            template=self._step,
            warnings=self._warnings,
        )

    def _prepare_template(self) -> None:
        if self._dataset.template is None and self._step is not None:
            self._dataset.template = self._template_of(self._step)

    def _check(self) -> list[str]:
        if self._dataset.is_encoded:
            labels = [row.get('labels') for row in self._dataset]
            problems = [_problem_of(array) for array in labels]
        else:
            self._prepare_template()
            template = self._dataset.template
            if template is None:
                raise NotReady('there is no template; apply set_template before check', needs='set_template')
            problems = template.batch_check(list(self._dataset))
        found = [f'rows[{index}]: {problem}' for index, problem in enumerate(problems) if problem is not None]
        rest = len(found) - _REPORTED_ROWS
        return [*found[:_REPORTED_ROWS], f'and {rest} more rows'] if rest > 0 else found


def _problem_of(labels: Any) -> str | None:
    is_useless = labels is not None and bool((np.asarray(labels) == IGNORE_INDEX).all())
    return 'nothing in it is trained on: no label counts' if is_useless else None


def _mix(tables: Sequence[Table], *, is_interleaved: bool) -> Table:
    first = tables[0]
    if any(table.is_lazy for table in tables):
        raise InvalidField('source.mixture.dataset_ids', 'must not be lazy; mix first, and say is_lazy of the mixture')
    states = {(table.is_encoded, table.is_packed) for table in tables}
    if len(states) > 1:
        problem = 'the parts of a mixture must all be encoded, all be packed, or all be neither'
        raise InvalidField('source.mixture.dataset_ids', problem)
    mixed = PackingDataset()
    for table in tables:
        mixed.add_dataset(DatasetMeta(data=table.rows))
    mixed.mix_dataset(interleave=is_interleaved)
    templates = {table.template for table in tables}
    if first.is_encoded and len(templates) > 1:
        raise InvalidField('source.mixture.dataset_ids', 'were encoded with different templates; mix before encoding')
    return Table(
        rows=list(mixed),
        is_encoded=first.is_encoded,
        is_packed=first.is_packed,
        template=first.template if len(templates) == 1 else None,
    )
