"""Convert rows from and to the Hugging Face library `datasets`, which is imported only when it is needed.

Objects of the library are recognized only if the program has already imported it, because otherwise none can exist.
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
    """Return one split of a `DatasetDict` or `IterableDatasetDict`; other data is returned unchanged.

    Raises:
        DatasetError: the split does not exist.
    """
    if not _is_any(data, 'DatasetDict', 'IterableDatasetDict'):
        return data
    splits = cast('Mapping[str, Any]', data)
    if split not in splits:
        raise DatasetError(f'split {split!r} does not exist in data; it has: {", ".join(splits)}')
    return splits[split]


def is_table(data: Any) -> bool:
    """Return whether `data` is a `datasets.Dataset`."""
    return _is_any(data, 'Dataset')


def is_stream(data: Any) -> bool:
    """Return whether `data` is a `datasets.IterableDataset`."""
    return _is_any(data, 'IterableDataset')


def rows_of_table(data: Any) -> 'ArrowRows':
    """Return the stored rows of a `datasets.Dataset`; rows that were selected or reordered are copied.

    Raises:
        DatasetError: the dataset has a transform, which is not part of the stored rows.
    """
    from twinkle.dataset.arrow_rows import ArrowRows  # noqa: PLC0415 - pyarrow is imported only if needed

    if data.format['type'] == 'custom':
        raise DatasetError('data has a transform (set_transform), which is not applied here; pass it to map() instead')
    columns, is_all = data.format['columns'], data.format['output_all_columns']
    arrow = data.with_format('arrow', columns=None if is_all else columns)
    return ArrowRows(arrow[:])


def rows_of_stream(data: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets.IterableDataset`, from the beginning."""
    return (dict(row) for row in data.with_format(None))


def dataset_of(rows: Iterable[Row]) -> Any:
    """Return rows as a `datasets.Dataset`; an Arrow table is shared, other rows are copied to a new table.

    Raises:
        MissingLibrary: `datasets` is not installed.
        UnreadableFile: a column has values of incompatible types.
    """
    from twinkle.dataset.arrow_files import table_of  # noqa: PLC0415 - pyarrow is imported only if needed
    from twinkle.dataset.arrow_rows import ArrowRows  # noqa: PLC0415 - pyarrow is imported only if needed

    library = _library()
    table = rows.table if isinstance(rows, ArrowRows) else table_of(map(plain, rows), _BATCH_ROWS)
    return library.Dataset(table)


def stream_of(opened: Callable[[], Iterator[Row]]) -> Any:
    """Return a `datasets.IterableDataset` that calls `opened` for every iteration.

    Raises:
        MissingLibrary: `datasets` is not installed.
    """
    return _library().IterableDataset.from_generator(_Passes(opened))


class _Passes:
    """Callable without arguments that starts an iteration and converts numpy arrays to lists for `datasets`."""

    def __init__(self, opened: Callable[[], Iterator[Row]]) -> None:
        self._opened = opened

    def __call__(self) -> Iterator[Row]:
        return map(plain, self._opened())


_BATCH_ROWS = 1000
"""Number of rows converted to columns together."""


def _is_any(data: Any, *names: str) -> bool:
    library = sys.modules.get('datasets')
    kinds: Sequence[Any] = [getattr(library, name, None) for name in names]
    return any(isinstance(kind, type) and isinstance(data, kind) for kind in kinds)


def _library() -> Any:
    try:
        return importlib.import_module('datasets')
    except ModuleNotFoundError as error:
        raise MissingLibrary('datasets', 'datasets>=4') from error
