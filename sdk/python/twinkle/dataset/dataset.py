"""A dataset in memory, whose rows are mapped, filtered, encoded and read by index."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from twinkle.dataset.base import BaseDataset
from twinkle.dataset.hf import table_of
from twinkle.dataset.hints import ExecutionOptions, library_options, log_effectless
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.mixing import mixed_order
from twinkle.dataset.row_bounds import Row, RowBounds, counted, size_in_memory
from twinkle.dataset.row_steps import EncodeTally, cast_row, encode_batch, is_kept, map_rows, problems_of, read_rows
from twinkle.dataset.sources import load_rows
from twinkle.dataset.table_steps import ARRAY_COLUMNS, KeepRow, MapBatch, encoded_table, problems_in
from twinkle.dataset.tables import TableRows, joined
from twinkle.preprocessor import FilterFunction, FormatReader, MapFunction
from twinkle.template import EncodedChat, Template

_BATCH_ROWS = 1000
"""Number of rows per call of a preprocessor or tokenizer."""


class Dataset(BaseDataset[Sequence[Row]]):
    """Training rows in memory; a method that changes rows does so before it returns.

    Such methods are atomic: if one raises, all rows are unchanged.
    """

    bounds: RowBounds | None = None
    """Limits on the rows that `map` and `encode` create, checked for each batch; None for no limit."""

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in order of first appearance."""
        rows = self._rows
        if isinstance(rows, TableRows):
            return list(rows.table.column_names)
        return list({name: None for row in rows for name in row})

    def __len__(self) -> int:
        return len(self._rows)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | list[Row]':
        if isinstance(index, slice):
            return [self[position] for position in range(*index.indices(len(self)))]
        row = self._rows[index]
        return self._read(index % len(self._rows), row)

    def __iter__(self) -> Iterator[Row]:
        return (self._read(index, row) for index, row in enumerate(self._rows))

    def to_hf(self) -> Any:
        """Return the rows as a `datasets.Dataset`.

        Rows of a table are shared; others are copied.

        Raises:
            MissingLibrary: `datasets` is not installed.
            UnreadableFile: a column has values of incompatible types.
        """
        rows = self._rows_to_save()
        return rows.table if isinstance(rows, TableRows) else table_of(rows)

    def _facts(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {'rows': len(rows), 'columns': list(rows[0]) if rows else []}

    def _load(self, meta: DatasetMeta) -> Sequence[Row]:
        return load_rows(meta)

    def _mixed(self, parts: Sequence[Sequence[Row]], *, is_interleaved: bool) -> Sequence[Row]:
        tables = [rows for rows in parts if isinstance(rows, TableRows)]
        if len(tables) == len(parts):
            return joined(tables, is_interleaved=is_interleaved)
        order = mixed_order([len(rows) for rows in parts], is_interleaved=is_interleaved)
        return [parts[part][row] for part, row in order]

    def _mapped(self, rows: Sequence[Row], function: MapFunction, options: ExecutionOptions) -> Sequence[Row]:
        table = self._table(rows, options)
        if table is not None:
            return table.changed(MapBatch(function), library_options('map', options, function))
        step = options.get('batch_size') or _BATCH_ROWS
        begins = range(0, len(rows), step)
        batches = (map_rows(rows[begin : begin + step], function, begin=begin) for begin in begins)
        return [row for batch in batches for row in self._charged(batch)]

    def _filtered(self, rows: Sequence[Row], function: FilterFunction, options: ExecutionOptions) -> Sequence[Row]:
        table = self._table(rows, options)
        if table is not None:
            return table.filtered(KeepRow(function), library_options('filter', options, function))
        return [row for index, row in enumerate(rows) if is_kept(row, function, index=index)]

    def _cast(self, rows: Sequence[Row], column: str, decode: Callable[[Any], Any]) -> Sequence[Row]:
        return [cast_row(row, column, decode, index=index) for index, row in enumerate(rows)]

    def _encoded(
        self, rows: Sequence[Row], template: Template, report: list[str], reader: FormatReader,
        options: ExecutionOptions,
    ) -> Sequence[Row]:  # fmt: skip
        tally = EncodeTally(template)
        table = self._table(rows, options)
        if table is None:
            examples = self._encoded_list(rows, template, reader, tally, options.get('batch_size') or _BATCH_ROWS)
        else:
            read_rows(reader, table[:1], begin=0)  # the first row determines the format for all processes
            examples = encoded_table(table, template, reader, tally, library_options('encode', options))
        report += [*reader.new_reports(), *tally.lines()]
        return examples

    def _encoded_list(
        self, rows: Sequence[Row], template: Template, reader: FormatReader, tally: EncodeTally, step: int
    ) -> list[Row]:
        examples: list[Row] = []
        for begin in range(0, len(rows), step):
            batch, encoded = encode_batch(template, reader, rows[begin : begin + step], begin=begin)
            self._charge_encoded(batch, encoded)
            tally.add(encoded)
            pairs = zip(batch, encoded, strict=True)
            examples += [{**row, **feature} for row, chat in pairs for feature in chat.features]
        return examples

    def _checked(
        self, rows: Sequence[Row], template: Template, problems: list[str], reader: FormatReader,
        options: ExecutionOptions,
    ) -> Sequence[Row]:  # fmt: skip
        table = self._table(rows, options)
        if table is None:
            found = problems_of(template, reader, rows, begin=0)
        else:
            found = problems_in(table, template, reader, library_options('check', options))
        problems += [f'rows[{index}]: {problem}' for index, problem in enumerate(found) if problem is not None]
        kept = [index for index, problem in enumerate(found) if problem is None]
        return [rows[index] for index in kept] if table is None else table.select(kept)

    def _rows_to_save(self) -> Sequence[Row]:
        return self._rows

    def _table(self, rows: Sequence[Row], options: ExecutionOptions) -> TableRows | None:
        """Return rows as a table if they are in one, or if the options need one; otherwise return None."""
        if isinstance(rows, TableRows) or self.bounds is not None:
            return rows if isinstance(rows, TableRows) else None
        if (options.get('num_proc') or 1) == 1 or not len(rows):
            used = frozenset({'batch_size', 'num_proc'})
            log_effectless('a dataset in memory', options, 'its rows are Python objects', used=used)
            return None
        return TableRows(
            table_of(rows, is_mixed_allowed=True), arrays=ARRAY_COLUMNS if self.is_encoded else frozenset()
        )

    def _charged(self, rows: list[Row]) -> Iterable[Row]:
        return rows if self.bounds is None else counted(rows, self.bounds)

    def _charge_encoded(self, rows: Sequence[Row], chats: Sequence[EncodedChat]) -> None:
        if self.bounds is None:
            return
        for row, chat in zip(rows, chats, strict=True):
            self.bounds.charge(
                sum(map(size_in_memory, chat.features)) + len(chat.features) * size_in_memory(row), len(chat.features)
            )
