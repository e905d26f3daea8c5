"""Several stages in a row: rewriters and filters, and what each of them left out."""

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
"""Filters of chats, by name."""
STAGES: Mapping[str, type[Any]] = {
    **QUALITY_FILTERS,
    'MessageNormalizer': MessageNormalizer,
    'TextLengthFilter': TextLengthFilter,
}
"""What a pipeline takes by name."""
DEFAULT_PIPELINE = ('MessageNormalizer', *QUALITY_FILTERS)
_SPEC = {'name', 'init_args'}
_NOT_KEPT = 'not_kept'
"""Reason of rows that a filter without reasons of its own leaves out."""
_FAILED = 'failed'
"""Reason of rows over which a stage stumbled."""
_ROW_ERRORS = (ValueError, LookupError, TypeError, ArithmeticError, AttributeError)
"""Errors that a row can cause; others are of the program and are raised."""


class QualityPreprocessor(Preprocessor):
    """Sends rows through stages in order; a row that a stage leaves out goes no further, and is accounted for.

    As a preprocessor it returns the rows that stay. `split` returns both; `end_pass` counts; with a
    `dropped_log_path`, every row left out is in that file with its reason. Rows may come in batches: all batches
    until `begin_pass` are one pass, over which `DedupFilter` remembers and `row_index` counts.

    Concurrency: one pass at a time.
    """

    def __init__(
        self,
        pipeline: Sequence[str | Mapping[str, Any] | type | Callable[..., Any]] = DEFAULT_PIPELINE,
        dropped_log_path: str | None = None,
    ) -> None:
        """Build the stages.

        Args:
            pipeline: names, `{'name': ..., 'init_args': {...}}`, classes, objects, or functions of a row that say
                whether it stays. Unset: the normalizer, then all filters of this package.
            dropped_log_path: JSONL file for rows left out, begun anew in each pass. Unset: they are only counted.

        Raises:
            UnknownPreprocessor: a name is not known.
            InvalidArguments: a stage is no such thing or is given arguments it does not take, or the file's folder
                does not exist.
        """
        if isinstance(pipeline, str) or not pipeline:
            raise InvalidArguments('pipeline must be a list of at least one stage')
        self.pipeline = list(pipeline)
        self.dropped_log_path = dropped_log_path
        self._stages = [_stage(spec, f'pipeline[{index}]') for index, spec in enumerate(pipeline)]
        self._log = DroppedLog(dropped_log_path) if dropped_log_path is not None else None
        self.begin_pass()

    def begin_pass(self) -> None:
        """Forget the rows seen before, in all stages."""
        self._seen = 0
        self._counts: Counter[tuple[str, str]] = Counter()
        if self._log is not None:
            self._log.begin_pass()
        for stage in self._stages:
            if isinstance(stage, RowPreprocessor | DataFilter):
                stage.begin_pass()

    def end_pass(self) -> list[str]:
        """Return how many rows were left out, one line a stage and reason."""
        return [
            f'{count} of {self._seen} rows were left out by {stage}: {reason}'
            for (stage, reason), count in sorted(self._counts.items())
        ]

    def __call__(self, rows: Columns) -> Columns:
        """Return the rows that stay."""
        kept, _ = self.split(self.map_col_to_row(rows))
        # Without rows there are no names either; the columns are to stay.
        return self.map_row_to_col(kept) if kept else {name: [] for name in rows}

    def split(self, rows: Iterable[Row]) -> tuple[list[Row], list[DroppedRow]]:
        """Return the rows that stay, as the stages rewrote them, and those that do not; both in order."""
        kept: list[Row] = []
        dropped: list[DroppedRow] = []
        for row in rows:
            outcome = self._passed(row)
            self._seen += 1
            if isinstance(outcome, DroppedRow):
                dropped.append(outcome)
            else:
                kept.append(outcome)
        self._counts.update((row.stage, row.drop.reason) for row in dropped)
        if self._log is not None:
            self._log.write(dropped)
        return kept, dropped

    def _passed(self, row: Row) -> Row | DroppedRow:
        for stage in self._stages:
            try:
                outcome = _run(stage, row, self._seen)
            except InvalidRow as error:
                outcome = Drop(UNREADABLE, f'{error.column} {error.problem}'.strip())
            except _ROW_ERRORS as error:
                # A stage of the caller's own met a row it did not expect. Raising here would leave the rows before it
                # remembered as seen, though nobody got them.
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


def _stage(spec: Any, place: str) -> Stage:
    name: Any = spec
    init_args: Any = None
    if isinstance(spec, Mapping):
        fields = cast('Mapping[str, Any]', spec)
        if 'name' not in fields or set(fields) - _SPEC:
            raise InvalidArguments(f'{place} must have a name, and perhaps init_args, got {sorted(fields)}')
        name, init_args = fields['name'], fields.get('init_args')
        if not isinstance(name, str) or not isinstance(init_args, Mapping | NoneType):
            raise InvalidArguments(f'{place}: name must be text and init_args an object')
    stage = construct(name, cast('Mapping[str, Any] | None', init_args), STAGES, 'stage')
    if isinstance(stage, Preprocessor) and not isinstance(stage, RowPreprocessor):
        raise InvalidArguments(f'{place}: {type(stage).__name__} rewrites whole batches; map the dataset by it before')
    return stage
