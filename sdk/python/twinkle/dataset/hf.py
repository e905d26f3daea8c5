"""Rows to and from Hugging Face `datasets`, which is never loaded unless the program brought it or asks for it.

Objects of theirs are known by the library that is loaded already: without it there are none.
"""

import importlib
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, cast

from twinkle.component import MissingLibrary
from twinkle.dataset.errors import DatasetError
from twinkle.dataset.files import Row, plain

if TYPE_CHECKING:
    from twinkle.dataset.arrow_rows import ArrowRows


def split_of(data: Any, split: str) -> Any:
    """Return one split of a `DatasetDict` or `IterableDatasetDict`; whatever else it is, as it is.

    Raises:
        DatasetError: it has no such split.
    """
    if not _is_any(data, 'DatasetDict', 'IterableDatasetDict'):
        return data
    splits = cast('Mapping[str, Any]', data)
    if split not in splits:
        raise DatasetError(f'split {split!r} is not in data; there are {", ".join(splits)}')
    return splits[split]


def is_table(data: Any) -> bool:
    """Say whether rows are a `datasets.Dataset`."""
    return _is_any(data, 'Dataset')


def is_stream(data: Any) -> bool:
    """Say whether rows are a `datasets.IterableDataset`."""
    return _is_any(data, 'IterableDataset')


def rows_of_table(data: Any) -> 'ArrowRows':
    """Return the rows of a `datasets.Dataset` as they are stored, where they are in memory or on disk.

    One whose rows were chosen or reordered (`select`, `shuffle`) is gathered into a table of its own.

    Raises:
        DatasetError: it has a transform, which is no part of its rows.
    """
    from twinkle.dataset.arrow_rows import ArrowRows  # noqa: PLC0415 - pyarrow is loaded where a table is met

    if data.format['type'] == 'custom':
        raise DatasetError('data has a transform (set_transform), which is no part of its rows; give it to map() here')
    columns, is_all = data.format['columns'], data.format['output_all_columns']
    arrow = data.with_format('arrow', columns=None if is_all else columns)
    return ArrowRows(arrow[:])


def rows_of_stream(data: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets.IterableDataset`, from the beginning."""
    return (dict(row) for row in data.with_format(None))


def dataset_of(rows: Iterable[Row]) -> Any:
    """Return rows as a `datasets.Dataset`; a table is shared, other rows become one.

    Raises:
        MissingLibrary: `datasets` is not installed.
        UnreadableFile: a column holds values of types that do not go together.
    """
    from twinkle.dataset.arrow_files import table_of  # noqa: PLC0415 - pyarrow is loaded where a table is met
    from twinkle.dataset.arrow_rows import ArrowRows  # noqa: PLC0415 - as above

    library = _library()
    table = rows.table if isinstance(rows, ArrowRows) else table_of(map(plain, rows), _BATCH_ROWS)
    return library.Dataset(table)


def stream_of(opened: Callable[[], Iterator[Row]]) -> Any:
    """Return a `datasets.IterableDataset` that begins a pass each time it is iterated over.

    Raises:
        MissingLibrary: `datasets` is not installed.
    """
    return _library().IterableDataset.from_generator(_Passes(opened))


class _Passes:
    """A function of no arguments that does not have to be pickled to be told from others."""

    def __init__(self, opened: Callable[[], Iterator[Row]]) -> None:
        self._opened = opened

    def __call__(self) -> Iterator[Row]:
        return map(plain, self._opened())


_BATCH_ROWS = 1000


def _is_any(data: Any, *names: str) -> bool:
    library = sys.modules.get('datasets')
    kinds: Sequence[Any] = [getattr(library, name, None) for name in names]
    return any(isinstance(kind, type) and isinstance(data, kind) for kind in kinds)


def _library() -> Any:
    try:
        return importlib.import_module('datasets')
    except ModuleNotFoundError as error:
        raise MissingLibrary('datasets', 'datasets>=4') from error
