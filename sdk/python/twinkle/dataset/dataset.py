"""A dataset in memory, whose rows are mapped, filtered, encoded and read by index."""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, overload

from twinkle.dataset.base import BaseDataset
from twinkle.dataset.files import Row
from twinkle.dataset.hf import dataset_of
from twinkle.dataset.meta import DatasetMeta
from twinkle.dataset.mixing import mixed_order
from twinkle.dataset.row_bounds import RowBounds, counted, size_in_memory
from twinkle.dataset.row_steps import EncodeTally, cast_row, encode_rows, is_kept, map_rows, problems_of, read_rows
from twinkle.dataset.sources import load_rows
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
        return list({name: None for row in self._rows for name in row})

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

        Unchanged rows of an Arrow table share its memory; others are copied.

        Raises:
            MissingLibrary: `datasets` is not installed.
            UnreadableFile: a column has values of incompatible types.
        """
        return dataset_of(self._rows_to_save())

    def _facts(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {'rows': len(rows), 'columns': list(rows[0]) if rows else []}

    def _load(self, meta: DatasetMeta) -> Sequence[Row]:
        return load_rows(meta)

    def _mixed(self, parts: Sequence[Sequence[Row]], *, is_interleaved: bool) -> Sequence[Row]:
        order = mixed_order([len(rows) for rows in parts], is_interleaved=is_interleaved)
        return [parts[part][row] for part, row in order]

    def _mapped(self, rows: Sequence[Row], function: MapFunction) -> Sequence[Row]:
        begins = range(0, len(rows), _BATCH_ROWS)
        batches = (map_rows(rows[begin : begin + _BATCH_ROWS], function, begin=begin) for begin in begins)
        return [row for batch in batches for row in self._charged(batch)]

    def _filtered(self, rows: Sequence[Row], function: FilterFunction) -> Sequence[Row]:
        return [row for index, row in enumerate(rows) if is_kept(row, function, index=index)]

    def _cast(self, rows: Sequence[Row], column: str, decode: Callable[[Any], Any]) -> Sequence[Row]:
        return [cast_row(row, column, decode, index=index) for index, row in enumerate(rows)]

    def _encoded(
        self, rows: Sequence[Row], template: Template, report: list[str], reader: FormatReader
    ) -> Sequence[Row]:
        examples: list[Row] = []
        tally = EncodeTally(template)
        for begin in range(0, len(rows), _BATCH_ROWS):
            batch, indices = read_rows(reader, rows[begin : begin + _BATCH_ROWS], begin=begin)
            encoded = encode_rows(template, batch, indices=indices, is_prompt=reader.is_prompt)
            self._charge_encoded(batch, encoded)
            tally.add(encoded)
            pairs = zip(batch, encoded, strict=True)
            examples += [{**row, **feature} for row, chat in pairs for feature in chat.features]
        report += [*reader.new_reports(), *tally.lines()]
        return examples

    def _checked(
        self, rows: Sequence[Row], template: Template, problems: list[str], reader: FormatReader
    ) -> Sequence[Row]:
        found = problems_of(template, reader, rows, begin=0)
        problems += [f'rows[{index}]: {problem}' for index, problem in enumerate(found) if problem is not None]
        return [row for row, problem in zip(rows, found, strict=True) if problem is None]

    def _rows_to_save(self) -> Sequence[Row]:
        return self._rows

    def _charged(self, rows: list[Row]) -> Iterable[Row]:
        return rows if self.bounds is None else counted(rows, self.bounds)

    def _charge_encoded(self, rows: Sequence[Row], chats: Sequence[EncodedChat]) -> None:
        if self.bounds is None:
            return
        for row, chat in zip(rows, chats, strict=True):
            self.bounds.charge(
                sum(map(size_in_memory, chat.features)) + len(chat.features) * size_in_memory(row), len(chat.features)
            )
