"""The row engine, which uses the component library to read rows and to apply steps to them."""

import asyncio
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack, closing
from dataclasses import replace
from functools import lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from twinkle.data_format import IGNORE_INDEX, listed_base_model
from twinkle.dataset import DatasetMeta, NotReady, PackingDataset, counted, find_files
from twinkle.dataset.row_steps import problems_of
from twinkle.hub import HubError, local_path
from twinkle.preprocessor import FormatReader, build_filter, build_preprocessor, report_of
from twinkle.template import Template, build_template
from twinkle_services.data.backends.bounded import bounded_rows
from twinkle_services.data.backends.hub_rows import HubAccess, RowProcess
from twinkle_services.data.backends.lazy_rows import LazyReader
from twinkle_services.data.backends.library_errors import source_errors, step_errors
from twinkle_services.data.backends.pending_steps import apply_pending
from twinkle_services.data.backends.streamed import LibraryStream, StreamReader
from twinkle_services.data.domain import (
    MAX_INTERLEAVED,
    CheckStep,
    Dataset,
    DecodedBytes,
    EncodeStep,
    FilterStep,
    HubSource,
    HubStream,
    Loader,
    MapStep,
    PackStep,
    Row,
    RowMeter,
    Step,
    StreamMixture,
    StreamPart,
    Table,
    TemplateStep,
)
from twinkle_services.data.ports import RowReader
from twinkle_services.kit.errors import InvalidField
from twinkle_services.kit.telemetry import spans
from twinkle_services.kit.worker import Threads, completed

_REPORTED_ROWS = 20
"""Maximum number of rows that a check names in its warnings."""
MAX_INSPECTIONS = 4
"""Maximum number of processes for calls that create or peek streamed datasets; other calls wait. At least
`MAX_INTERLEAVED`, because a call that peeks a mixture takes one for each part."""


class LibraryEngine:
    """Implements `RowEngine` with `twinkle.dataset`."""

    def __init__(
        self, threads: Threads, *, base_models: Sequence[str], access: HubAccess, template_cache: int,
        download_limit_bytes: int, decoded: DecodedBytes,
    ) -> None:  # fmt: skip
        """Create the engine.

        Args:
            threads: Threads in which rows are read and changed.
            base_models: Models that a template may name by the path of a folder, and that may be private. They have the
                same names with and without the prefix of a hub.
            access: Determines which datasets may be read by path, and which datasets and other models may be private.
            template_cache: Maximum number of templates in memory.
            download_limit_bytes: Maximum size of the files of a dataset that is downloaded from a hub.
            decoded: Limits on the rows that loaders of streamed datasets have in memory. A process that reads such a
                dataset has at most the memory of a tenant.
        """
        self._threads = threads
        self._base_models = tuple(base_models)
        self._download_limit_bytes = download_limit_bytes
        self._access = access
        self._template = lru_cache(maxsize=template_cache)(self._build_template)
        self._decoded = decoded
        self._streams = StreamReader(self._template, access, decoded.limits.tenant_bytes)
        self._inspections = asyncio.Semaphore(MAX_INSPECTIONS)
        self._inspection_lock = asyncio.Lock()

    async def read_hub(self, source: HubSource, meter: RowMeter) -> Table:
        return await self._threads.run(self._read_hub, source, meter)

    async def find_stream(self, source: HubSource) -> HubStream:
        async with self._inspections:
            with source_errors('source.hub', hub_id=source.dataset_id):
                revision, columns = await completed(asyncio.to_thread(self._find, source))
        return HubStream(hub=source, revision=revision, columns=columns)

    def stream(self, dataset: Dataset, loader: Loader, *, consumed: int) -> LibraryStream:
        meter = RowMeter(self._decoded, dataset.tenant_id)
        return LibraryStream(self._streams, dataset, loader, meter, consumed=consumed)

    async def stream_rows(self, dataset: Dataset, *, begin: int, count: int) -> Sequence[Row | InvalidField]:
        async with AsyncExitStack() as processes:
            # Calls take their processes one after the other, so that two calls do not wait for each other.
            async with self._inspection_lock:
                for _ in range(dataset.process_count):
                    await processes.enter_async_context(self._inspections)
            with self._decoded.meter(dataset.tenant_id) as meter:
                reading = asyncio.to_thread(self._streams.rows, dataset, meter, begin=begin, count=count)
                return await completed(reading)

    async def read_file(self, path: str, file_format: str, meter: RowMeter) -> Table:
        with source_errors('source.upload'):
            rows = await self._threads.run(lambda: list(bounded_rows(Path(path), meter, file_format)))
        return Table(rows=rows)

    async def mix(self, tables: Sequence[Table], *, is_interleaved: bool) -> Table:
        return await self._threads.run(_mix, tables, is_interleaved=is_interleaved)

    async def apply(self, table: Table, steps: Sequence[Step], meter: RowMeter) -> Table:
        steps = [self._with_deployed_model(step) for step in steps]
        if table.is_lazy or table.stream is not None:
            return await self._threads.run(apply_pending, table, steps, self._template)
        name = 'template' if any(isinstance(step, EncodeStep) for step in steps) else 'steps'
        with spans.span(name, step_count=len(steps)):
            return await self._threads.run(self._apply, table, steps, meter)

    def lazy_reader(self, dataset: Dataset, reader: RowReader) -> RowReader:
        return LazyReader(dataset, reader, self._threads, self._template)

    def _read_hub(self, source: HubSource, meter: RowMeter) -> Table:
        access = self._access
        meta = DatasetMeta(source.dataset_id, subset_name=source.subset_name, split=source.split)
        with source_errors('source.hub', hub_id=source.dataset_id):
            files = find_files(
                meta,
                is_local_allowed=access.is_local_allowed(source.dataset_id),
                is_private_allowed=access.is_private_allowed(source.dataset_id),
                is_move_allowed=False,
                download_limit_bytes=self._download_limit_bytes,
            )
            # Rows before the first one are counted, too; rows after the last one are not read.
            with closing(row for file in files for row in bounded_rows(file, meter)) as rows:
                chosen = list(islice(rows, source.begin_row, source.end_row))
        return Table(rows=chosen)

    def _find(self, source: HubSource) -> tuple[str, tuple[str, ...]]:
        memory_bytes = self._decoded.limits.tenant_bytes
        process = RowProcess(source, revision='', access=self._access, memory_bytes=memory_bytes)
        with closing(process):
            return process.found()

    def _apply(self, table: Table, steps: Sequence[Step], meter: RowMeter) -> Table:
        runner = _StepRunner(table, self._template, meter)
        for index, step in enumerate(steps):
            with step_errors(index, step, table):
                runner.apply(step)
        return runner.table()

    def _with_deployed_model(self, step: Step) -> Step:
        """Return a step with the configured name of a base model, which may differ from its name in a hub prefix."""
        if not isinstance(step, TemplateStep):
            return step
        return replace(step, base_model=listed_base_model(step.base_model, self._base_models) or step.base_model)

    def _build_template(self, step: TemplateStep) -> Template:
        is_deployed = step.base_model in self._base_models
        if not is_deployed and local_path(step.base_model) is not None:
            # The error does not reveal whether the path exists.
            raise HubError('no such model')
        return build_template(
            step.name,
            model_id=step.base_model,
            max_length=step.max_length,
            truncation_strategy=step.truncation_strategy,
            default_system=step.default_system,
            enable_thinking=step.is_thinking_enabled,
            is_private_allowed=is_deployed or self._access.is_private_allowed(step.base_model),
            # The token may be used only for the repositories that the operator named.
            is_move_allowed=False,
            # Features on the wire contain no pixels yet, and a client must not read files of this machine.
            is_media_read=False,
        )


class _StepRunner:
    """Applies steps to a table, one after another."""

    def __init__(self, table: Table, template_of: Callable[[TemplateStep], Template], meter: RowMeter) -> None:
        self._dataset = PackingDataset(DatasetMeta(data=table.rows))
        self._dataset.bounds = self._meter = meter
        self._dataset.is_encoded, self._dataset.is_packed = table.is_encoded, table.is_packed
        self._template_step = table.template
        self._template_of = template_of
        self._warnings: list[str] = []

    def apply(self, step: Step) -> None:
        dataset = self._dataset
        match step:
            case MapStep():
                preprocessor = build_preprocessor(step.preprocessor, step.init_args)
                with self._meter.replacing():
                    dataset.map(preprocessor)
                self._warnings += report_of(preprocessor)
            case FilterStep():
                row_filter = build_filter(step.filter, step.init_args)
                dataset.filter(row_filter)
                self._warnings += report_of(row_filter)
            case TemplateStep():
                dataset.set_template(self._template_of(step))
                self._template_step = step
            case EncodeStep():
                self._load_template()
                with self._meter.replacing():
                    is_prompt = step.is_generation_prompt_added
                    self._warnings += dataset.encode(add_generation_prompt=is_prompt, format=step.row_format)
            case PackStep():
                self._load_template()
                with self._meter.replacing():
                    dataset.pack_dataset()
                    deque(counted(dataset, self._meter), maxlen=0)
            case CheckStep():
                self._warnings += self._check(step.row_format)
        if not len(dataset):
            self._warnings.append(f'no rows are left after {step.kind}')

    def table(self) -> Table:
        dataset = self._dataset
        return Table(
            rows=list(dataset),
            is_encoded=dataset.is_encoded,
            is_packed=dataset.is_packed,
            template=self._template_step,
            warnings=self._warnings,
        )

    def _load_template(self) -> None:
        if self._dataset.template is None and self._template_step is not None:
            self._dataset.template = self._template_of(self._template_step)

    def _check(self, row_format: str | None) -> list[str]:
        if self._dataset.is_encoded:
            labels = [row.get('labels') for row in self._dataset]
            problems = [_problem_of(array) for array in labels]
        else:
            self._load_template()
            template = self._dataset.template
            if template is None:
                raise NotReady('the dataset has no template; apply set_template before check', needs='set_template')
            problems = problems_of(template, FormatReader(row_format), list(self._dataset), begin=0)
        found = [f'rows[{index}]: {problem}' for index, problem in enumerate(problems) if problem is not None]
        rest = len(found) - _REPORTED_ROWS
        return [*found[:_REPORTED_ROWS], f'and {rest} more rows'] if rest > 0 else found


def _problem_of(labels: Any) -> str | None:
    is_ignored = labels is not None and bool((np.asarray(labels) == IGNORE_INDEX).all())
    return 'all labels are ignored, so training learns nothing from this row' if is_ignored else None


def _mixed_streams(tables: Sequence[Table], *, is_interleaved: bool) -> StreamMixture:
    field = 'source.mixture.dataset_ids'
    if is_interleaved and len(tables) > MAX_INTERLEAVED:
        raise InvalidField(field, f'must name at most {MAX_INTERLEAVED} streamed datasets to alternate between')
    parts: list[StreamPart] = []
    for table in tables:
        if not isinstance(table.stream, HubStream):
            raise InvalidField(field, 'must all be streamed from a hub, because one is; mixtures cannot be parts')
        if not all(isinstance(step, MapStep | FilterStep) for step in table.pending) or table.template is not None:
            raise InvalidField(field, 'must only have map and filter steps; apply the other steps to the mixture')
        parts.append(StreamPart(stream=table.stream, pending=table.pending))
    return StreamMixture(parts=tuple(parts), is_interleaved=is_interleaved)


def _mix(tables: Sequence[Table], *, is_interleaved: bool) -> Table:
    first = tables[0]
    if any(table.stream is not None for table in tables):
        return Table(rows=[], stream=_mixed_streams(tables, is_interleaved=is_interleaved))
    if any(table.is_lazy for table in tables):
        problem = 'must not be lazy; mix eager datasets, and set is_lazy for the mixture'
        raise InvalidField('source.mixture.dataset_ids', problem)
    states = {(table.is_encoded, table.is_packed) for table in tables}
    if len(states) > 1:
        problem = 'must all be packed, all be encoded without being packed, or all be unencoded'
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
