"""A pipeline of preprocessors and filters that records the reason for each removed row."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import NoneType
from typing import Any, cast

from twinkle.preprocessor.base import Columns, DataFilter, Preprocessor, Row, RowPreprocessor
from twinkle.preprocessor.construct import construct
from twinkle.preprocessor.errors import InvalidArguments, InvalidRow
from twinkle.preprocessor.length_filter import TextLengthFilter
from twinkle.preprocessor.quality.base import UNREADABLE, Drop, DroppedRow, QualityFilter
from twinkle.preprocessor.quality.dead_loop import DeadLoopFilter
from twinkle.preprocessor.quality.dedup import DedupFilter
from twinkle.preprocessor.quality.dropped_log import DroppedLog
from twinkle.preprocessor.quality.hard_filter import HardFilter
from twinkle.preprocessor.quality.message_normalizer import MessageNormalizer
from twinkle.preprocessor.quality.message_sanity import MessageSanityFilter
from twinkle.preprocessor.quality.refuse import RefuseFilter

Stage = RowPreprocessor | DataFilter | Callable[[Row], bool]

QUALITY_FILTERS: dict[str, type[DataFilter]] = {
    kind.__name__: kind for kind in (HardFilter, MessageSanityFilter, RefuseFilter, DeadLoopFilter, DedupFilter)
}
"""Quality filters by name."""
STAGES: Mapping[str, type[Any]] = {
    **QUALITY_FILTERS,
    'MessageNormalizer': MessageNormalizer,
    'TextLengthFilter': TextLengthFilter,
}
"""Stages of a pipeline by name."""
DEFAULT_PIPELINE = ('MessageNormalizer', *QUALITY_FILTERS)
_SPEC = {'name', 'init_args'}
"""Keys of a stage that is given as a mapping."""
_NOT_KEPT = 'not_kept'
"""Reason for rows removed by a filter that does not report reasons."""
_FAILED = 'failed'
"""Reason for rows for which a stage raised an exception."""
_ROW_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
"""Exceptions that a row can cause in a stage; other exceptions are raised."""


class QualityPreprocessor(Preprocessor):
    """Applies stages to rows in order; a row that a stage removes does not reach the later stages.

    A call returns the kept rows, and `split` also returns the removed rows with their reasons. `end_pass` returns the
    number of removed rows per reason. `dropped_log_path` names a file for the removed rows. All batches until the next
    `begin_pass` are one iteration: `DedupFilter` compares all their rows, and `row_index` counts across batches.

    Concurrency: one iteration at a time; not safe to share between threads.
    """

    def __init__(
        self,
        pipeline: Sequence[str | Mapping[str, Any] | type | Callable[..., Any]] = DEFAULT_PIPELINE,
        dropped_log_path: str | None = None,
    ) -> None:
        """Build the stages.

        Args:
            pipeline: stages: names, `{'name': ..., 'init_args': {...}}`, classes, objects, or functions from a row to
                a boolean. Default: the normalizer, followed by all quality filters.
            dropped_log_path: JSON lines file for removed rows, overwritten in each iteration. Default: none; removed
                rows are only counted.

        Raises:
            UnknownPreprocessor: a name is not known.
            InvalidArguments: there is no stage, a stage is invalid or does not accept its arguments, or the folder of
                the file does not exist.
        """
        if isinstance(pipeline, str) or not pipeline:
            raise InvalidArguments('pipeline must be a list of at least one stage')
        self.pipeline = list(pipeline)
        self.dropped_log_path = dropped_log_path
        self._stages = [_stage(spec, f'pipeline[{index}]') for index, spec in enumerate(pipeline)]
        self._log = DroppedLog(dropped_log_path) if dropped_log_path is not None else None
        self.begin_pass()

    def begin_pass(self) -> None:
        """Reset the counters, the log file and the state of all stages."""
        self._seen = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        if self._log is not None:
            self._log.begin_pass()
        for stage in self._stages:
            if isinstance(stage, RowPreprocessor | DataFilter):
                stage.begin_pass()

    def end_pass(self) -> list[str]:
        """Return one line per stage and reason with the number of removed rows."""
        return [
            f'{count} of {self._seen} rows were left out by {stage}: {reason}'
            for (stage, reason), count in sorted(self._counts.items())
        ]

    def __call__(self, rows: Columns) -> Columns:
        """Return the kept rows."""
        kept, _ = self.split(self.map_col_to_row(rows))
        # An empty batch keeps the names of its columns.
        return self.map_row_to_col(kept) if kept else {name: [] for name in rows}

    def split(self, rows: Iterable[Row]) -> tuple[list[Row], list[DroppedRow]]:
        """Return the kept rows as the stages converted them, and the removed rows; both in order."""
        kept: list[Row] = []
        dropped: list[DroppedRow] = []
        for row in rows:
            outcome = self._run_stages(row)
            self._seen += 1
            if isinstance(outcome, DroppedRow):
                dropped.append(outcome)
            else:
                kept.append(outcome)
        self._counts.update((row.stage, row.drop.reason) for row in dropped)
        if self._log is not None:
            self._log.write(dropped)
        return kept, dropped

    def _run_stages(self, row: Row) -> Row | DroppedRow:
        for stage in self._stages:
            try:
                outcome = _run(stage, row, self._seen)
            except InvalidRow as error:
                outcome = Drop(UNREADABLE, f'{error.column} {error.problem}'.strip())
            except _ROW_ERRORS as error:
                # A custom stage failed on an unexpected row. Raising would discard the earlier rows of the batch,
                # although stateful filters already remember them.
                outcome = Drop(_FAILED, f'{type(error).__name__}: {error}')
            if isinstance(outcome, Drop):
                return DroppedRow(row_index=self._seen, stage=_name_of(stage), drop=outcome, row=row)
            row = outcome
        return row


def _run(stage: Stage, row: Row, row_index: int) -> Row | Drop:
    if isinstance(stage, RowPreprocessor):
        return stage.convert(row)
    if isinstance(stage, QualityFilter):
        return stage.judge(row, row_index=row_index) or row
    return row if stage(row) else Drop(_NOT_KEPT)


def _name_of(stage: Stage) -> str:
    if isinstance(stage, RowPreprocessor | DataFilter):
        return type(stage).__name__
    return getattr(stage, '__name__', type(stage).__name__)


def _stage(spec: Any, path: str) -> Stage:
    name: Any = spec
    init_args: Any = None
    if isinstance(spec, Mapping):
        fields = cast('Mapping[str, Any]', spec)
        if 'name' not in fields or set(fields) - _SPEC:
            raise InvalidArguments(f'{path} must have a name and optionally init_args, got {sorted(fields)}')
        name, init_args = fields['name'], fields.get('init_args')
        if not isinstance(name, str) or not isinstance(init_args, Mapping | NoneType):
            raise InvalidArguments(f'{path}: name must be text and init_args must be an object')
    stage = construct(name, cast('Mapping[str, Any] | None', init_args), STAGES, 'stage')
    if isinstance(stage, Preprocessor) and not isinstance(stage, RowPreprocessor):
        raise InvalidArguments(f'{path}: {type(stage).__name__} converts batches, not rows; use Dataset.map() for it')
    return stage
