"""Load the rows that a `DatasetMeta` names."""

from collections.abc import Mapping, Sequence
from typing import Any

from twinkle.dataset.errors import DatasetError
from twinkle.dataset.files import Row, read_rows
from twinkle.dataset.layout import files_of
from twinkle.dataset.meta import DatasetMeta
from twinkle.hub import resolve_dataset
from twinkle.infra import get_logger


def load_rows(meta: DatasetMeta, *, is_local_allowed: bool = True) -> list[Row]:
    """Return the rows of a dataset, sliced as the meta says.

    Args:
        is_local_allowed: whether `dataset_id` may be a path; a service that serves strangers says no.

    Raises:
        HubError: the dataset cannot be had.
        DatasetError: it has no such subset or split, or a file cannot be read.
    """
    rows = _rows_given(meta.data) if meta.data is not None else _rows_found(meta, is_local_allowed=is_local_allowed)
    return _sliced(rows, meta)


def _rows_found(meta: DatasetMeta, *, is_local_allowed: bool) -> list[Row]:
    path = resolve_dataset(meta.dataset_id or '', is_local_allowed=is_local_allowed)
    files = [path] if path.is_file() else files_of(path, subset_name=meta.subset_name, split=meta.split)
    return [row for file in files for row in read_rows(file)]


def _rows_given(data: Sequence[Mapping[str, Any]] | Mapping[str, Sequence[Any]]) -> list[Row]:
    if not isinstance(data, Mapping):
        return [dict(row) for row in data]
    lengths = {name: len(values) for name, values in data.items()}
    if len(set(lengths.values())) > 1:
        raise DatasetError(f'data has columns of different lengths: {lengths}')
    return [dict(zip(data, values, strict=True)) for values in zip(*data.values(), strict=True)]


def _sliced(rows: list[Row], meta: DatasetMeta) -> list[Row]:
    if meta.data_slice is None:
        return rows
    if isinstance(meta.data_slice, slice):
        return rows[meta.data_slice]
    wanted = [index for index in meta.data_slice if -len(rows) <= index < len(rows)]
    if len(wanted) < len(meta.data_slice):
        get_logger().warning(
            '%s has %d rows; data_slice asked for %d, of which %d are there',
            meta.name, len(rows), len(meta.data_slice), len(wanted),
        )  # fmt: skip
    return [rows[index] for index in wanted]
