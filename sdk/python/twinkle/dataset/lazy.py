"""A dataset whose rows are computed when they are read."""

from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, overload

from twinkle.dataset.dataset import Dataset
from twinkle.dataset.errors import DatasetError, InvalidExample
from twinkle.dataset.hints import ExecutionOptions, check_options, log_effectless
from twinkle.dataset.mixing import RowReference, mixed_order
from twinkle.dataset.passes import depends_on_earlier_rows
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.row_steps import EncodeTally, cast_row, encode_rows, is_kept, map_rows, problems_of, read_rows
from twinkle.dataset.streams import ROW_ERRORS, Item, RefusedRow
from twinkle.infra import get_logger
from twinkle.preprocessor import FilterFunction, FormatReader, MapFunction
from twinkle.template import Template

RowStep = Callable[[Row, int], Row]
"""Function from a row and its index to a new row."""


class LazyDataset(Dataset):
    """Training rows that are computed on access; only the original rows are stored.

    `map`, `cast_column`, `mix_dataset`, `encode` and `check` return immediately and are applied to a row each time it
    is read. Therefore each method must produce exactly one output row for each input row. Errors in a row are raised
    when the row is read, and so are the problems that `check` finds; `DataLoader` logs them and uses a different row
    instead. `filter` reads all rows immediately.
    """

    def item(self, index: int) -> Item:
        """Return a row, or a `RefusedRow` if a step refuses it, which counts the steps that are applied on access."""
        item = _item_of(self._rows, range(len(self))[index])
        return item if isinstance(item, RefusedRow) else self._read(index % len(self), item)

    def _facts(self, rows: Sequence[Row]) -> Mapping[str, Any]:
        return {'rows': len(rows)}

    def _check_options(self, verb: str, options: ExecutionOptions, *, is_batched: bool | None) -> None:
        check_options(verb, options, is_batched=is_batched)
        log_effectless(verb, options, 'rows are processed in this process when they are read')

    def _mixed(self, parts: Sequence[Sequence[Row]], *, is_interleaved: bool) -> Sequence[Row]:
        return _SelectedRows(parts, mixed_order([len(rows) for rows in parts], is_interleaved=is_interleaved))

    def _mapped(self, rows: Sequence[Row], function: MapFunction, options: ExecutionOptions) -> Sequence[Row]:
        if depends_on_earlier_rows(function):
            name = type(function).__name__
            raise DatasetError(
                f'{name} depends on earlier rows, which a LazyDataset does not support; '
                'use Dataset instead, or remove rows with filter()'
            )

        def step(row: Row, index: int) -> Row:
            mapped = map_rows([row], function, begin=index)
            if len(mapped) != 1:
                problem = (
                    f'was mapped to {len(mapped)} rows, but a LazyDataset needs 1; '
                    'use Dataset instead, or remove rows with filter()'
                )
                raise InvalidExample(index, '', problem)
            return mapped[0]

        return _ChangedRows(rows, step)

    def _filtered(self, rows: Sequence[Row], function: FilterFunction, options: ExecutionOptions) -> Sequence[Row]:
        kept = [(0, index) for index, row in enumerate(rows) if is_kept(row, function, index=index)]
        return _SelectedRows([rows], kept)

    def _cast(self, rows: Sequence[Row], column: str, decode: Callable[[Any], Any]) -> Sequence[Row]:
        return _ChangedRows(rows, lambda row, index: cast_row(row, column, decode, index=index))

    def _encoded(
        self,
        rows: Sequence[Row],
        template: Template,
        report: list[str],
        reader: FormatReader,
        options: ExecutionOptions,
    ) -> Sequence[Row]:
        return _ChangedRows(rows, _EncodeStep(template, reader))

    def _checked(
        self,
        rows: Sequence[Row],
        template: Template,
        problems: list[str],
        reader: FormatReader,
        options: ExecutionOptions,
    ) -> Sequence[Row]:
        def step(row: Row, index: int) -> Row:
            (problem,) = problems_of(template, reader.again(), [row], begin=index)
            if problem is not None:
                raise InvalidExample(index, '', f'would not be trained on: {problem}')
            return row

        return _ChangedRows(rows, step)

    def _refuse_template(self, template: Template) -> None:
        if template.truncation_strategy == 'split':
            raise DatasetError(
                "truncation_strategy 'split' makes several rows from one, which a LazyDataset does not support; "
                "use Dataset, or 'raise', 'left', 'right' or 'delete'"
            )


class _EncodeStep:
    """Encodes rows; logs the formats that occur, the first row that was cut and the first row without labels.

    The format of each row is recognized separately, so that a row is encoded in the same way in any order of reading.
    """

    def __init__(self, template: Template, reader: FormatReader) -> None:
        self._template = template
        self._reader = reader
        self._tally = EncodeTally(template)
        self._reports: set[str] = set()

    def __call__(self, row: Row, index: int) -> Row:
        reader = self._reader.again()
        rows, indices = read_rows(reader, [row], begin=index)
        self._log(reader.new_reports())
        if len(rows) != 1:
            raise InvalidExample(index, '', 'is a pair of two chats, but a LazyDataset needs one; use Dataset instead')
        row = rows[0]
        chat = encode_rows(self._template, rows, indices=indices, is_prompt=reader.is_prompt)[0]
        if not chat.features:
            problem = f'has {chat.token_count} tokens, more than max_length {self._template.max_length}; it is left out'
            raise InvalidExample(index, '', problem)
        self._tally.add([chat])
        for line in self._tally.new_lines():
            get_logger().warning('rows[%d] and possibly others: %s', index, line)
        return {**row, **chat.features[0]}

    def _log(self, reports: list[str]) -> None:
        for line in set(reports) - self._reports:
            self._reports.add(line)
            get_logger().warning('%s', line)


class _LazyRows(Sequence[Row]):
    """Rows that are computed on access."""

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> Sequence[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | Sequence[Row]':
        if isinstance(index, slice):
            return [self._at(position) for position in range(*index.indices(len(self)))]
        if not -len(self) <= index < len(self):
            raise IndexError(f'row {index} is out of range for {len(self)} rows')
        return self._at(index % len(self))

    def __iter__(self) -> Iterator[Row]:
        return (self._at(index) for index in range(len(self)))

    def _at(self, index: int) -> Row:
        item = self.item(index)
        if isinstance(item, RefusedRow):
            raise item.error
        return item

    @abstractmethod
    def item(self, index: int) -> Item:
        """Return the row at `index`, which is within range, or the refused row."""


class _ChangedRows(_LazyRows):
    """Rows with a step applied to each row on access."""

    def __init__(self, rows: Sequence[Row], step: RowStep) -> None:
        self._rows = rows
        self._step = step

    def __len__(self) -> int:
        return len(self._rows)

    def item(self, index: int) -> Item:
        item = _item_of(self._rows, index)
        if isinstance(item, RefusedRow):
            return item.passed()
        try:
            return self._step(item, index)
        except ROW_ERRORS as error:
            return RefusedRow(error)


class _SelectedRows(_LazyRows):
    """Selected rows of several datasets."""

    def __init__(self, parts: Sequence[Sequence[Row]], references: Sequence[RowReference]) -> None:
        self._parts = parts
        self._references = references

    def __len__(self) -> int:
        return len(self._references)

    def item(self, index: int) -> Item:
        part, row = self._references[index]
        item = _item_of(self._parts[part], row)
        is_mixed = len(self._parts) > 1
        return replace(item, part=part) if is_mixed and isinstance(item, RefusedRow) else item


def _item_of(rows: Sequence[Row], index: int) -> Item:
    return rows.item(index) if isinstance(rows, _LazyRows) else rows[index]
