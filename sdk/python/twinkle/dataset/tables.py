"""Rows in a table of the library `datasets`: read by index, and changed by functions on batches of rows.

The library divides the rows among processes, stores the results in its cache, and finds them again by a fingerprint of
the rows and the function.
"""
# pyright: reportUnknownVariableType=false, reportUnknownArgumentType=false, reportUnknownMemberType=false

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

import numpy as np

from twinkle.dataset.errors import DatasetError, UnreadableFile
from twinkle.dataset.hf import library
from twinkle.dataset.row_bounds import Row
from twinkle.dataset.streams import BatchChange
from twinkle.preprocessor import Preprocessor


class TableRows(Sequence[Row]):
    """The rows of a `datasets.Dataset`; each access returns a new dict.

    Args:
        table: the table, without a format.
        arrays: columns whose values are numpy arrays in a row; a null of such a column is left out.
    """

    def __init__(self, table: Any, *, arrays: frozenset[str] = frozenset()) -> None:
        self.table = table
        self.arrays = arrays & {*table.column_names}
        columns = [name for name in table.column_names if name in self.arrays]
        self._formatted = table.with_format('numpy', columns=columns, output_all_columns=True) if columns else table
        self._restore = _Restore({name: _dtype_of(table.features[name]) for name in columns})

    def __len__(self) -> int:
        return len(self.table)

    @overload
    def __getitem__(self, index: int) -> Row: ...

    @overload
    def __getitem__(self, index: slice) -> list[Row]: ...

    def __getitem__(self, index: int | slice) -> 'Row | list[Row]':
        if isinstance(index, slice):
            return list(self.select(index))
        if not -len(self) <= index < len(self):
            raise IndexError(f'row {index} is out of range for {len(self)} rows')
        return self._restore(self._formatted[index % len(self)])

    def __iter__(self) -> Iterator[Row]:
        return map(self._restore, self._formatted)

    def select(self, selection: slice | Sequence[int]) -> 'TableRows':
        """Return some of the rows, which are not copied."""
        indices = range(*selection.indices(len(self))) if isinstance(selection, slice) else selection
        return TableRows(self.table.select(indices), arrays=self.arrays)

    def changed(self, change: BatchChange, options: Mapping[str, Any]) -> Sequence[Row]:
        """Return the rows that a function creates from batches of these rows.

        Args:
            change: function from some rows and the index of the first one to any number of new rows.
            options: arguments of `datasets.Dataset.map`.

        Raises:
            DatasetError: a column has values of different types.
            Exception: the function raised it.
        """
        function = _BatchFunction(change, self._restore)
        try:
            with _type_errors():
                table = self._formatted.map(
                    function, batched=True, with_indices=True, remove_columns=self.table.column_names, **options
                )
        except library().arrow_writer.SchemaInferenceError:  # the function returned no rows at all
            return []
        return TableRows(table.with_format(None), arrays=self.arrays)

    @property
    def file(self) -> Path | None:
        """The first file of the table in the library's cache; None for a table in memory."""
        return next((Path(entry['filename']) for entry in self.table.cache_files), None)

    def fingerprint_after(self, change: BatchChange) -> str:
        """Return a fingerprint of the rows that `change` creates from these rows."""
        return library().fingerprint.Hasher.hash((self.table._fingerprint, change))  # noqa: SLF001 - the library has no other name for it

    def filtered(self, is_kept: Callable[[Row, int], bool], options: Mapping[str, Any]) -> 'TableRows':
        """Return the rows that a function of a row and its index accepts; `options` are those of `Dataset.filter`."""
        kept = self._formatted.filter(_RowFunction(is_kept, self._restore), with_indices=True, **options)
        return TableRows(kept.with_format(None), arrays=self.arrays)

    def texts(self, function: BatchChange, column: str, options: Mapping[str, Any]) -> list[str | None]:
        """Return one text or None per row; `function` returns rows that contain only `column`."""
        features = library().Features({column: library().Value('string')})
        found = self.changed(function, {**options, 'features': features})
        return [row[column] for row in found]


def joined(parts: Sequence[TableRows], *, is_interleaved: bool = False) -> TableRows:
    """Return the rows of several tables without copying them.

    Args:
        parts: the tables.
        is_interleaved: whether to take rows in turn from each table; an exhausted table is skipped. Default: False,
            which concatenates the tables.

    Raises:
        UnreadableFile: a column has different types.
    """
    tables = [part.table for part in parts if len(part)] or [part.table for part in parts[:1]]
    try:
        if is_interleaved and len(tables) > 1:
            table = library().interleave_datasets(tables, stopping_strategy='all_exhausted_without_replacement')
        else:
            table = library().concatenate_datasets(tables)
    except (ValueError, TypeError) as error:
        raise UnreadableFile(
            f'the datasets have columns of different types: {error}; convert one with map()'
        ) from error
    return TableRows(table, arrays=frozenset[str]().union(*(part.arrays for part in parts)))


@dataclass(frozen=True)
class _Restore:
    """Converts a row of the library's numpy format to the stored dtypes."""

    dtypes: Mapping[str, Any]

    def __call__(self, row: Mapping[str, Any]) -> Row:
        restored = dict(row)
        for name, dtype in self.dtypes.items():
            value = restored.pop(name, None)
            if value is not None:
                restored[name] = np.asarray(value, dtype=dtype)
        return restored


@dataclass(frozen=True)
class _BatchFunction:
    """Function for `datasets.Dataset.map`."""

    change: BatchChange
    restore: _Restore

    def __call__(self, columns: Mapping[str, Sequence[Any]], indices: Sequence[int]) -> Mapping[str, list[Any]]:
        names = list(columns)
        values = zip(*(columns[name] for name in names), strict=True)
        rows = [self.restore(dict(zip(names, row, strict=True))) for row in values]
        # A batch without rows needs a column.
        return Preprocessor.map_row_to_col(self.change(rows, indices[0])) or {'': []}


@dataclass(frozen=True)
class _RowFunction:
    """Function for `datasets.Dataset.filter`."""

    is_kept: Callable[[Row, int], bool]
    restore: _Restore

    def __call__(self, row: Mapping[str, Any], index: int) -> bool:
        return self.is_kept(self.restore(row), index)


@contextmanager
def _type_errors() -> Generator[None]:
    """Convert the library's errors about the types of columns; all other errors are raised unchanged."""
    import pyarrow as pa  # noqa: PLC0415 - imported only if needed

    try:
        yield
    except (pa.ArrowException, TypeError, ValueError) as error:
        is_cast = isinstance(error, pa.ArrowException | library().table.CastError)
        if not is_cast and not str(error).startswith("Couldn't cast"):
            raise
        problem = f'a column has values of different types: {error}; return the same types and columns for every row'
        raise DatasetError(problem) from error


def _dtype_of(feature: Any) -> Any:
    while not isinstance(feature, library().Value):
        feature = feature.feature
    return np.dtype(feature.dtype)
