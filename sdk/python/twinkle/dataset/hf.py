"""Convert rows from and to the Hugging Face library `datasets`, which is imported when a dataset needs it.

Objects of the library are recognized only if the program has already imported it, because otherwise none can exist.
"""

import importlib
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from twinkle.component import MissingLibrary
from twinkle.dataset.errors import DatasetError, UnreadableFile
from twinkle.dataset.row_bounds import Row


def library() -> Any:
    """Import `datasets`, which takes a second and about 100 MB of memory.

    Raises:
        MissingLibrary: `datasets` is not installed.
    """
    try:
        return importlib.import_module('datasets')
    except ModuleNotFoundError as error:
        raise MissingLibrary('datasets', 'twinkle-grpc[data]') from error


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


def selected_columns(data: Any) -> Any:
    """Return a `datasets.Dataset` without a format, restricted to the columns that its format selects.

    Raises:
        DatasetError: the dataset has a transform, which is not part of the stored rows.
    """
    if data.format['type'] == 'custom':
        raise DatasetError('data has a transform (set_transform), which is not applied here; pass it to map() instead')
    columns, is_all = data.format['columns'], data.format['output_all_columns']
    chosen = data if is_all or columns == data.column_names else data.select_columns(columns)
    return chosen.with_format(None)


def rows_of_stream(data: Any) -> Iterator[Row]:
    """Yield the rows of a `datasets.IterableDataset`, from the beginning."""
    return (dict(row) for row in data.with_format(None))


def as_stored(data: Any) -> Any:
    """Return a `datasets.Dataset` or `IterableDataset` whose images, audio and similar values are not decoded.

    Values inside lists and objects of a `datasets.Dataset` are decoded on access, because changing their type copies
    the table.
    """
    features: Mapping[str, Any] = data.features or {}
    for name, feature in features.items():
        stored = _undecoded(feature) if is_stream(data) or hasattr(feature, 'decode') else feature
        if stored != feature:
            data = data.cast_column(name, stored)
    return data


def _undecoded(feature: Any) -> Any:
    """Return the feature of the values as they are stored. Decoding would open the paths and addresses in them."""
    if isinstance(feature, dict):
        return {name: _undecoded(item) for name, item in cast('dict[str, Any]', feature).items()}
    if hasattr(feature, 'feature'):
        return replace(feature, feature=_undecoded(feature.feature))
    is_decoded = getattr(feature, 'decode', False) and type(feature).__name__ != 'Json'
    return type(feature)(decode=False) if is_decoded else feature


def table_of(rows: Iterable[Row], *, is_mixed_allowed: bool = False) -> Any:
    """Return rows as a new `datasets.Dataset` in memory.

    The table has the columns of all rows, in order of first appearance; missing values are null.

    Args:
        rows: the rows.
        is_mixed_allowed: whether values of several types may become a column of JSON. Default: False.

    Raises:
        MissingLibrary: `datasets` is not installed.
        UnreadableFile: the rows have no columns, or a column has values of incompatible types.
    """
    listed = list(rows)
    names = {name: None for row in listed for name in row}
    if listed and not names:
        raise UnreadableFile('the rows have no columns; remove them, or use jsonl')
    columns = {name: [row.get(name) for row in listed] for name in names}
    options = {'on_mixed_types': 'use_json' if is_mixed_allowed else None}
    try:
        return library().Dataset.from_dict(columns, **options)
    except _TYPE_ERRORS:
        for name, values in columns.items():
            _check_column(name, values, options)
        raise


def _check_column(name: str, values: list[Any], options: Mapping[str, Any]) -> None:
    try:
        library().Dataset.from_dict({name: values}, **options)
    except _TYPE_ERRORS as error:
        problem = f'column {name!r} cannot be written: {error}; convert its values to one type, or use jsonl'
        raise UnreadableFile(problem) from error


_TYPE_ERRORS = (ValueError, TypeError, OverflowError, NotImplementedError)
"""Errors of the library for values that are not of one type; its own classes derive from these."""


def _is_any(data: Any, *names: str) -> bool:
    module = sys.modules.get('datasets')
    kinds: Sequence[Any] = [getattr(module, name, None) for name in names]
    return any(isinstance(kind, type) and isinstance(data, kind) for kind in kinds)
