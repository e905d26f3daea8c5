"""Sources of a dataset's rows; local rows and files are uploaded to the data service first."""

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

import numpy as np

from twinkle.api.data.v1 import dataset_pb2
from twinkle_client.dataset.hugging_face import is_table, split_of
from twinkle_client.dataset.upload import upload_file, upload_lines, upload_table
from twinkle_client.rpc import Connection

_FORMATS = {
    '.jsonl': dataset_pb2.FILE_FORMAT_JSONL,
    '.json': dataset_pb2.FILE_FORMAT_JSONL,
    '.parquet': dataset_pb2.FILE_FORMAT_PARQUET,
    '.csv': dataset_pb2.FILE_FORMAT_CSV,
}


class MetaLike(Protocol):
    """Common interface of this package's and the library's `DatasetMeta`."""

    @property
    def dataset_id(self) -> str | None: ...
    @property
    def subset_name(self) -> str | None: ...
    @property
    def split(self) -> str | None: ...
    @property
    def data_slice(self) -> Any: ...
    @property
    def data(self) -> Any: ...


@dataclass(frozen=True)
class DatasetMeta:
    """Description of a dataset's source."""

    dataset_id: str = ''
    """`hf://org/name`, `ms://org/name`, a bare id, or the path of a local JSONL, Parquet or CSV file."""
    subset_name: str = 'default'
    split: str = 'train'
    data_slice: range | slice | Sequence[int] | None = None
    """Rows to use: a range for hub datasets, any row numbers for rows in memory and JSONL files."""
    data: Iterable[Mapping[str, Any]] | Mapping[str, Sequence[Any]] | None = None
    """Rows or columns in memory, or a `datasets.Dataset`, `IterableDataset` or dict of splits, instead of an id."""


async def dataset_source(
    connection: Connection, meta: MetaLike, *, is_streamed: bool = False
) -> dataset_pb2.DatasetSource:
    """Return the source for `CreateDataset`, uploading local rows and files first.

    Raises:
        ValueError: There is neither an id nor rows, the source does not support `data_slice`, or it cannot be streamed.
        FileNotFoundError: The id has the suffix of a JSONL, Parquet or CSV file, but the file does not exist.
    """
    if is_streamed:
        return _streamed_source(meta)
    data = split_of(meta.data, meta.split)
    if is_table(data):
        return await upload_table(connection, data, meta.data_slice)
    if data is not None:
        lines = [json.dumps(row, default=_json_value, ensure_ascii=False) for row in _rows(data)]
        return await upload_lines(connection, _sliced(lines, meta.data_slice))
    if not meta.dataset_id:
        raise ValueError('dataset_id is empty; pass an id, a file, or rows as data=')
    path = Path(meta.dataset_id)
    if path.suffix not in _FORMATS or '://' in meta.dataset_id:
        return _hub_source(meta)
    _check_file(path)
    if meta.data_slice is None:
        return await upload_file(connection, path, _FORMATS[path.suffix])
    if _FORMATS[path.suffix] != dataset_pb2.FILE_FORMAT_JSONL:
        raise ValueError(f'data_slice is not supported for {path.suffix} files; use JSONL')
    return await upload_lines(connection, _sliced(_read_lines(path), meta.data_slice))


def _rows(data: Any) -> list[dict[str, Any]]:
    """Return the rows of data given as rows or as columns."""
    if isinstance(data, Mapping):
        columns = cast(Mapping[str, Sequence[Any]], data)
        return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]
    return list(data)


def _hub_source(meta: MetaLike) -> dataset_pb2.DatasetSource:
    rows: Any = meta.data_slice
    if isinstance(rows, slice):
        bounds = cast(Any, rows)
        rows = range(bounds.start or 0, bounds.stop or -1, bounds.step or 1)
    if rows is not None and (not isinstance(rows, range) or rows.step != 1 or not 0 <= rows.start <= rows.stop):
        raise ValueError(f'data_slice of a hub dataset must be a non-negative range of step 1, got {rows!r}')
    subset = '' if meta.subset_name in {None, 'default'} else str(meta.subset_name)
    hub = dataset_pb2.HubSource(dataset_id=str(meta.dataset_id), subset_name=subset, split=meta.split or 'train')
    if rows is not None:
        hub.begin_row, hub.end_row = rows.start, rows.stop
    return dataset_pb2.DatasetSource(hub=hub)


def _streamed_source(meta: MetaLike) -> dataset_pb2.DatasetSource:
    is_file = '://' not in (meta.dataset_id or '') and Path(meta.dataset_id or '').suffix in _FORMATS
    if meta.data is not None or not meta.dataset_id or is_file:
        raise ValueError('only a dataset on a hub can be streamed; use Dataset or LazyDataset for rows and files')
    return _hub_source(meta)


def _check_file(path: Path) -> None:
    if not path.is_file():
        raise FileNotFoundError(f'there is no file {str(path)!r} in {Path.cwd()}; a hub dataset is named org/name')


def _read_lines(path: Path) -> list[str]:
    return [line for line in path.read_text(encoding='utf-8').splitlines() if line.strip()]


def _sliced(lines: list[str], rows: range | slice | Sequence[int] | None) -> list[str]:
    if rows is None:
        return lines
    if isinstance(rows, slice):
        return lines[rows]
    if isinstance(rows, range):
        # Rows beyond the end of the data are ignored.
        rows = [row for row in rows if row < len(lines)]
    return [lines[row] for row in rows]


def _json_value(value: Any) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        return cast(Any, value).tolist()
    raise ValueError(f'data: {type(value).__name__} cannot be represented in JSON')
