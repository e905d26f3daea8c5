"""A dataset that is read as a stream and is never completely in memory."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from twinkle.dataset.base import BaseDataset
from twinkle.dataset.files import plain
from twinkle.dataset.hf import library
from twinkle.dataset.hints import ExecutionOptions, check_options, log_effectless
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.passes import begin_pass, depends_on_earlier_rows, log_report
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.row_steps import EncodeTally, cast_row, encode_rows, is_kept, map_rows, problems_of, read_rows
from twinkle.dataset.sources import open_source, refuse_backwards, refuse_iterator, stream_rows
from twinkle.dataset.streams import BATCH_ROWS, BatchChange, Item, RefusedRow, Stream, chained, changed, interleaved
from twinkle.infra import get_logger
from twinkle.preprocessor import FilterFunction, FormatReader, MapFunction
from twinkle.template import Template

_REPORTED_ROWS = 20
"""Maximum number of removed rows that `check` logs in one iteration."""


class IterableDataset(BaseDataset[Stream]):
    """Training rows that are read in order in every iteration.

    Methods that change rows return immediately; rows are changed while they are read, up to 100 rows at a time. Reports
    that a `Dataset` returns are logged: the rows that `check` removes, and the rows that `encode` cuts or leaves out.
    The dataset has no length and cannot be indexed.
    """

    def __iter__(self) -> Iterator[Row]:
        """Start an iteration.

        Raises:
            Exception: one of `ROW_ERRORS`, because a row cannot be processed; the iteration ends. Use `items` to
                continue with the next row.
        """
        for item in self.items():
            if isinstance(item, RefusedRow):
                raise item.error
            yield item

    def items(self) -> Iterator[Item]:
        """Start an iteration that yields a `RefusedRow` for each row that cannot be processed and then continues."""
        for position, item in enumerate(self._rows):
            yield item if isinstance(item, RefusedRow) else self._read(position, item)

    def to_hf(self) -> Any:
        """Return the rows as a `datasets.IterableDataset`; each of its iterations reads this dataset again.

        Raises:
            MissingLibrary: `datasets` is not installed.
        """
        return library().IterableDataset.from_generator(_Passes(self))

    def _load(self, meta: DatasetMeta) -> Stream:
        refuse_backwards(meta)
        refuse_iterator(meta)
        # A missing dataset raises an error now instead of at the first row.
        source = open_source(meta, is_streamed=True) if meta.data is None else None
        return Stream(lambda: iter(stream_rows(meta, source)))

    def _check_options(self, verb: str, options: ExecutionOptions, *, is_batched: bool | None) -> None:
        check_options(verb, options, is_batched=is_batched)
        log_effectless(verb, options, 'rows are processed in this process when they are read')

    def _mixed(self, parts: Sequence[Stream], *, is_interleaved: bool) -> Stream:
        return interleaved(parts) if is_interleaved else chained(parts)

    def _mapped(self, rows: Stream, function: MapFunction, options: ExecutionOptions) -> Stream:
        def start_pass() -> BatchChange:
            begin_pass(function)
            return lambda batch, begin: map_rows(batch, function, begin=begin)

        batch_rows = 1 if depends_on_earlier_rows(function) else BATCH_ROWS
        return changed(rows, start_pass, batch_rows=batch_rows, at_end=lambda: log_report(function))

    def _filtered(self, rows: Stream, function: FilterFunction, options: ExecutionOptions) -> Stream:
        def kept(batch: list[Row], begin: int) -> list[Row]:
            return [row for index, row in enumerate(batch, start=begin) if is_kept(row, function, index=index)]

        def start_pass() -> BatchChange:
            begin_pass(function)
            return kept

        return changed(rows, start_pass, batch_rows=1, at_end=lambda: log_report(function))

    def _cast(self, rows: Stream, column: str, decode: Callable[[Any], Any]) -> Stream:
        def cast(batch: list[Row], begin: int) -> list[Row]:
            return [cast_row(row, column, decode, index=index) for index, row in enumerate(batch, start=begin)]

        return changed(rows, lambda: cast, batch_rows=1)

    def _encoded(
        self, rows: Stream, template: Template, report: list[str], reader: FormatReader, options: ExecutionOptions
    ) -> Stream:
        return changed(rows, lambda: _encoder(template, reader.again()))

    def _checked(
        self, rows: Stream, template: Template, problems: list[str], reader: FormatReader, options: ExecutionOptions
    ) -> Stream:
        return changed(rows, lambda: _checker(template, reader.again()))

    def _rows_to_save(self) -> Iterable[Row]:
        return iter(self)


class _Passes:
    """Callable without arguments that starts an iteration and converts numpy arrays to lists for `datasets`."""

    def __init__(self, rows: Iterable[Row]) -> None:
        self._rows = rows

    def __call__(self) -> Iterator[Row]:
        return map(plain, self._rows)


def _encoder(template: Template, reader: FormatReader) -> BatchChange:
    """Return a function that encodes the rows of one iteration, and logs their format and each kind of problem once."""
    tally = EncodeTally(template)

    def encode(batch: list[Row], begin: int) -> list[Row]:
        rows, indices = read_rows(reader, batch, begin=begin)
        chats = encode_rows(template, rows, indices=indices, is_prompt=reader.is_prompt)
        tally.add(chats)
        for line in (*reader.new_reports(), *tally.new_lines()):
            get_logger().warning('%s', line)
        return [{**row, **feature} for row, chat in zip(rows, chats, strict=True) for feature in chat.features]

    return encode


def _checker(template: Template, reader: FormatReader) -> BatchChange:
    """Return a function that removes the unusable rows of one iteration, and logs the first unusable rows."""
    reported = 0

    def check(batch: list[Row], begin: int) -> list[Row]:
        nonlocal reported
        found = problems_of(template, reader, batch, begin=begin)
        for index, problem in enumerate(found, start=begin):
            if problem is not None and reported < _REPORTED_ROWS:
                reported += 1
                suffix = ' (further rows are not logged)' if reported == _REPORTED_ROWS else ''
                get_logger().warning('rows[%d]: %s; left out%s', index, problem, suffix)
        return [row for row, problem in zip(batch, found, strict=True) if problem is None]

    return check
